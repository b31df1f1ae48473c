"""GPUs that the driver or the PCI bus has lost: XID 79's face for whoever sees no kernel log."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.gpu.samples import Code, NvmlSample
from everstep.agent.checks.xids import gpu_item
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result

DO = "Reboot the machine; if it happens again, ask the vendor."


class Lost(Check[NvmlSample, Limits]):
    """One result per GPU that there is or was."""

    name = "gpu.lost"
    source = "nvml"
    about = "no GPU has fallen off the bus (NVML code 15, PCI registers that read as ones)"

    def judge(self, here: Here, history: History[NvmlSample]) -> Iterable[Result]:
        del here
        now = history.now.sample
        if now.silent_as_a_whole:
            yield self.could_not_run(now.silent_as_a_whole)
        before = history.past[-1].sample.silent if history.past else ()
        silent = set(now.silent) & set(before)  # twice: a reset makes the registers read so too
        for gpu in now.gpus:
            if gpu.failed_with(Code.GPU_IS_LOST):
                yield self._lost(gpu.name, "the driver says that the GPU is lost (NVML code 15)")
            elif gpu.pci in silent:
                yield self._lost(gpu.name, "the GPU does not answer on the PCI bus")
            elif gpu.values:
                yield self.passed("the GPU answers", item=gpu.name)
            else:
                codes = ", ".join(str(code) for code in sorted(set(gpu.errors.values())))
                yield self.could_not_run(f"NVML returned {codes or 'nothing'}", item=gpu.name)
        for pci in sorted(silent - {gpu.pci for gpu in now.gpus}):
            yield self._lost(gpu_item(pci), "the GPU is gone from the PCI bus")

    def _lost(self, item: str, why: str) -> Result:
        return self.found(Verdict.EVICT, Category.GPU_UNAVAILABLE, why, DO, item=item)
