"""Errors that a GPU's memory could not correct, and the driver's flag that they are too many.

One uncorrected error alone may be contained: it ends the program that used the page, and its XID
(94 or 95) says which it was. So the counter makes a suspect; only the flag evicts.
"""

from __future__ import annotations

from everstep.agent.checks.check import History, Limits
from everstep.agent.checks.gpu.per_gpu import PerGpu, rise
from everstep.agent.checks.gpu.samples import Gpu, NvmlSample, Signal
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result
from everstep.model import Seconds


class EccUncorrectedLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of gpu.ecc_uncorrected."""

    window_s: Seconds = 60.0
    """Seconds in which new errors are looked for; one is enough (DCGM, Meta's GCM)."""


class EccUncorrected(PerGpu[EccUncorrectedLimits]):
    """New volatile uncorrected errors."""

    name = "gpu.ecc_uncorrected"
    about = "no new uncorrectable memory errors (NVML field 4)"
    limits_type = EccUncorrectedLimits
    keep = 12

    def judge_gpu(self, gpu: History[Gpu], sample: NvmlSample) -> Result | None:
        del sample
        now = gpu.now.sample
        total = now.get(Signal.ECC_UNCORRECTED)
        if total is None:
            return None
        new, over_s = rise(gpu, Signal.ECC_UNCORRECTED, self.limits.window_s) or (0.0, 0.0)
        if not new:
            return self.passed("no new errors", item=now.name, ecc_uncorrected=total)
        return self.found(
            Verdict.SUSPECT,
            Category.GPU_MEMORY_ERROR,
            f"{new:.0f} uncorrectable memory errors within {over_s:.0f} s",
            "Test the machine at the next stop, and reset the GPU then.",
            item=now.name,
            values={"ecc_uncorrected": total},
        )


class SramThreshold(PerGpu[Limits]):
    """The flag that NVIDIA made for replacing a GPU."""

    name = "gpu.sram"
    about = "uncorrectable SRAM errors are below the vendor's threshold"

    def judge_gpu(self, gpu: History[Gpu], sample: NvmlSample) -> Result | None:
        del sample
        now = gpu.now.sample
        flag = now.get(Signal.SRAM_THRESHOLD)
        if flag is None:
            return None
        if not flag:
            return self.passed("below the threshold", item=now.name)
        if flag != 1:
            return self.could_not_run(f"the flag is {flag:.0f}", item=now.name)
        return self.found(
            Verdict.EVICT,
            Category.GPU_MEMORY_ERROR,
            "the driver says that its SRAM has had more uncorrectable errors than it may",
            "Run the vendor's field diagnostic; expect to replace the GPU.",
            item=now.name,
        )
