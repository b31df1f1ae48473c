"""A PCIe link of a GPU that trained to fewer lanes or a lower speed than both ends can do."""

from __future__ import annotations

from everstep.agent.checks.check import History, Limits
from everstep.agent.checks.gpu.per_gpu import PerGpu, under_load
from everstep.agent.checks.gpu.samples import Gpu, NvmlSample, Signal
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result


class PcieLink(PerGpu[Limits]):
    """Width always, speed under load: an idle link is slow to save power. Seen twice in a row."""

    name = "gpu.pcie_link"
    about = "the PCIe link has all its lanes, and its full speed under load (NVML)"

    def judge_gpu(self, gpu: History[Gpu], sample: NvmlSample) -> Result | None:
        del sample
        now = gpu.now.sample
        width, generation = now.get(Signal.PCIE_WIDTH), now.get(Signal.PCIE_GENERATION)
        if width is None and generation is None:
            return None
        wrong = _wrong(now)
        if wrong and gpu.past and wrong == _wrong(gpu.past[-1].sample):
            return self.found(
                Verdict.SUSPECT,
                Category.MFU_DECLINE,
                wrong,
                "Test the machine at the next stop; then reseat the GPU or its riser.",
                item=now.name,
                values={"pcie_width": width or 0.0, "pcie_generation": generation or 0.0},
            )
        return self.passed(
            "full width and speed",
            item=now.name,
            pcie_width=width or 0.0,
            pcie_generation=generation or 0.0,
        )


def _wrong(gpu: Gpu) -> str:
    width, most = gpu.get(Signal.PCIE_WIDTH), gpu.get(Signal.PCIE_WIDTH_MAX)
    if width and most and width < most:
        return f"the PCIe link has {width:.0f} of {most:.0f} lanes"
    speed, best = gpu.get(Signal.PCIE_GENERATION), gpu.get(Signal.PCIE_GENERATION_MAX)
    if speed and best and speed < best and under_load(gpu):
        return f"the PCIe link runs at generation {speed:.0f} of {best:.0f} under load"
    return ""
