"""A GPU's power: a limit lower than its neighbours', a sensor that stopped."""

from __future__ import annotations

from statistics import median

from everstep.agent.checks.check import History, Limits
from everstep.agent.checks.gpu.per_gpu import PerGpu
from everstep.agent.checks.gpu.samples import Code, Gpu, NvmlSample, Signal
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Counts, Result

NEVER_THERE = frozenset({Code.NOT_SUPPORTED, Code.FUNCTION_NOT_FOUND, Code.NO_PERMISSION})


class PowerLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of gpu.power."""

    least_share: float = 0.95
    """Of the median limit of this machine's GPUs, and of its own at the start: a limit lower than
    that slows the whole job down. A limit that all have is the site's choice."""


class Power(PerGpu[PowerLimits]):
    """Power limits, and whether power can be read."""

    name = "gpu.power"
    about = "power can be read, and no GPU has a lower limit than its neighbours (NVML)"
    limits_type = PowerLimits

    def judge_gpu(self, gpu: History[Gpu], sample: NvmlSample) -> Result | None:
        now = gpu.now.sample
        power, limit = now.get(Signal.POWER_W), now.get(Signal.POWER_LIMIT_W)
        error = now.errors.get(Signal.POWER_W)
        if power is None and gpu.first.sample.get(Signal.POWER_W) is None:
            return None
        if power is None:
            if error is None or error in NEVER_THERE:
                return self.could_not_run("its power cannot be read", item=now.name)
            why = f"its power can no longer be read (NVML code {error})"
            return self._found(now, why, "Test the machine at the next stop.", Counts.NEVER)
        if why := self._low(gpu, sample, limit):
            return self._found(now, why, "Set the limit with nvidia-smi -pl.", Counts.WITH_SLOWDOWN)
        return self.passed(
            f"{power:.0f} W", item=now.name, power_w=power, power_limit_w=limit or 0.0
        )

    def _low(self, gpu: History[Gpu], sample: NvmlSample, limit: float | None) -> str:
        limits = [each for other in sample.gpus if (each := other.get(Signal.POWER_LIMIT_W))]
        if not limit or not limits:
            return ""
        first = gpu.first.sample.get(Signal.POWER_LIMIT_W) or limit
        for typical, whose in ((median(limits), "its neighbours"), (first, "at the start")):
            if limit < self.limits.least_share * typical:
                return f"its power limit is {limit:.0f} W, {whose} {typical:.0f} W"
        return ""

    def _found(self, now: Gpu, why: str, do: str, counts: Counts) -> Result:
        return self.found(Verdict.WARN, Category.MFU_DECLINE, why, do, item=now.name, counts=counts)
