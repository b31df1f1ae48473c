"""The rate of memory errors that are corrected. Harmless one by one; very many stall the driver."""

from __future__ import annotations

from everstep.agent.checks.check import History, Limits
from everstep.agent.checks.gpu.per_gpu import PerGpu, rise
from everstep.agent.checks.gpu.samples import Gpu, NvmlSample, Signal
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result
from everstep.model import Seconds


class EccCorrectedLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of gpu.ecc_corrected."""

    per_s: float = 1000.0
    """Errors per second. 17,657 a second stalled a driver (NVIDIA/NVSentinel, issue 1748)."""
    window_s: Seconds = 60.0
    """Seconds over which the rate is taken; also the least time for a rate."""


class EccCorrected(PerGpu[EccCorrectedLimits]):
    """Rate of the volatile counter."""

    name = "gpu.ecc_corrected"
    about = "few corrected memory errors per second (NVML field 3)"
    limits_type = EccCorrectedLimits
    keep = 12

    def judge_gpu(self, gpu: History[Gpu], sample: NvmlSample) -> Result | None:
        del sample
        now = gpu.now.sample
        if now.get(Signal.ECC_CORRECTED) is None:
            return None
        new, over_s = rise(gpu, Signal.ECC_CORRECTED, self.limits.window_s * 1.5) or (0.0, 0.0)
        per_s = new / over_s if over_s >= self.limits.window_s else 0.0
        if per_s <= self.limits.per_s:
            return self.passed("few errors", item=now.name, ecc_corrected_per_s=per_s)
        return self.found(
            Verdict.WARN,
            Category.GPU_MEMORY_ERROR,
            f"{per_s:.0f} corrected memory errors a second, for {over_s:.0f} s",
            "Test the machine at the next stop.",
            item=now.name,
            values={"ecc_corrected_per_s": per_s},
        )
