"""Memory pages taken out of use: what GPUs before Ampere do instead of remapping rows."""

from __future__ import annotations

from everstep.agent.checks.check import History, Limits
from everstep.agent.checks.gpu.per_gpu import PerGpu
from everstep.agent.checks.gpu.samples import Gpu, NvmlSample, Signal
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result


class RetiredPagesLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of gpu.retired_pages; both are DCGM's."""

    most: int = 63
    """Pages, whatever they were retired for: the table of a GPU holds 64."""
    most_uncorrected: int = 15
    """Pages retired for uncorrectable errors."""


class RetiredPages(PerGpu[RetiredPagesLimits]):
    """Pages retired, or waiting for it."""

    name = "gpu.retired_pages"
    about = "few retired memory pages, none pending (NVML fields 29-31)"
    limits_type = RetiredPagesLimits

    def judge_gpu(self, gpu: History[Gpu], sample: NvmlSample) -> Result | None:
        del sample
        now = gpu.now.sample
        uncorrected = now.get(Signal.RETIRED_UNCORRECTED)
        if uncorrected is None:
            return None
        pages = uncorrected + (now.get(Signal.RETIRED_CORRECTED) or 0.0)
        if now.get(Signal.RETIRED_PENDING):
            return self._found(now, "a memory page waits to be retired, which needs a reset", pages)
        if pages >= self.limits.most or uncorrected >= self.limits.most_uncorrected:
            why = f"{pages:.0f} memory pages are retired, {uncorrected:.0f} as uncorrectable"
            return self._found(now, why, pages)
        return self.passed(f"{pages:.0f} pages retired", item=now.name, retired_pages=pages)

    def _found(self, now: Gpu, why: str, pages: float) -> Result:
        return self.found(
            Verdict.SUSPECT,
            Category.GPU_MEMORY_ERROR,
            why,
            "Reset the GPU at the next stop; if pages go on to retire, ask the vendor.",
            item=now.name,
            values={"retired_pages": pages},
        )
