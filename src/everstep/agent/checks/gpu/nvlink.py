"""NVLinks that were active when the machine came to the job, and are not."""

from __future__ import annotations

from everstep.agent.checks.check import History, Limits
from everstep.agent.checks.gpu.per_gpu import PerGpu
from everstep.agent.checks.gpu.samples import Gpu, NvmlSample, Signal
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result


class NvLink(PerGpu[Limits]):
    """Inactive against the baseline, twice in a row. What never was active may be unconnected."""

    name = "gpu.nvlink"
    about = "all NVLinks are active that were so at the start (NVML)"

    def judge_gpu(self, gpu: History[Gpu], sample: NvmlSample) -> Result | None:
        del sample
        now = gpu.now.sample
        active, first = _links(now), _links(gpu.first.sample)
        if active is None:
            return None
        before = _links(gpu.past[-1].sample) if gpu.past else None
        down = (first or 0) & ~active & ~(active if before is None else before)
        if before is None or not down:
            count = active.bit_count()
            return self.passed(f"{count} NVLinks are active", item=now.name, nvlinks=count)
        links = ", ".join(str(link) for link in range(down.bit_length()) if down >> link & 1)
        return self.found(
            Verdict.EVICT,
            Category.GPU_UNAVAILABLE,
            f"NVLink {links} went down; {active.bit_count()} of {(first or 0).bit_count()} are"
            " active",
            "Reset the GPUs and the fabric manager; if it stays so, ask the vendor.",
            item=now.name,
            values={"nvlinks": float(active.bit_count())},
        )


def _links(gpu: Gpu) -> int | None:
    bits = gpu.get(Signal.NVLINKS)
    return None if bits is None else int(bits)
