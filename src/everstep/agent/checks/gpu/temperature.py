"""GPUs that are too hot. Heat alone is no failure: it counts when throughput falls as well."""

from __future__ import annotations

from statistics import mean

from everstep.agent.checks.check import History, Limits
from everstep.agent.checks.gpu.per_gpu import PerGpu
from everstep.agent.checks.gpu.samples import Gpu, NvmlSample, Signal
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Counts, Result


class TemperatureLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of gpu.temperature."""

    hot_c: float = 90.0
    """Degrees Celsius that are hot for any GPU: Modal's fleet lost clocks of H100s from there. Said
    at the first sample, as is the GPU's own threshold of slowing down: it counts only when
    throughput falls, so nothing is gained by waiting (ByteRobust, Table 3: within ten seconds)."""
    above_others_c: float = 20.0
    """Degrees above the mean of the machine's other GPUs: a cooler that works less than theirs."""
    samples: int = 3
    """Samples in a row for that: neighbours may just have begun to work."""
    below_shutdown_c: float = 5.0
    """Degrees below the temperature at which the hardware switches itself off: leave before."""
    possible_c: float = 150.0
    """Degrees that no sensor can mean."""


class Temperature(PerGpu[TemperatureLimits]):
    """Against the GPU's own thresholds, and its neighbours."""

    name = "gpu.temperature"
    about = "no GPU is hotter than it may be for long, or than its neighbours (NVML)"
    limits_type = TemperatureLimits
    keep = 3

    def judge_gpu(self, gpu: History[Gpu], sample: NvmlSample) -> Result | None:
        now = gpu.now.sample
        heat = now.get(Signal.TEMPERATURE_C)
        if heat is None:
            return None
        if not 0.0 <= heat < self.limits.possible_c:
            return self.could_not_run(f"the sensor says {heat:.0f} C", item=now.name)
        if why := self._near_shutdown(gpu):
            do = "Take the machine out before it switches itself off; check its cooling."
            return self._hot(now, Verdict.EVICT, why, do)
        if why := self._too_hot(gpu, sample):
            return self._hot(now, Verdict.WARN, why, "Check the cooling of this machine.")
        return self.passed(f"{heat:.0f} C", item=now.name, temperature_c=heat)

    def _hot(self, now: Gpu, verdict: Verdict, why: str, do: str) -> Result:
        return self.found(
            verdict,
            Category.MFU_DECLINE if verdict is Verdict.WARN else Category.GPU_UNAVAILABLE,
            why,
            do,
            item=now.name,
            counts=Counts.WITH_SLOWDOWN if verdict is Verdict.WARN else Counts.NEVER,
            values={"temperature_c": now.get(Signal.TEMPERATURE_C) or 0.0},
        )

    def _near_shutdown(self, gpu: History[Gpu]) -> str:
        """Twice in a row. A threshold of 0 or less is none: some GPUs give margins instead.

        Below the temperature at which it slows itself down, it is no hotter than it may be.
        """
        pair = [each.sample for each in (*gpu.past[-1:], gpu.now)]
        most = self.limits.below_shutdown_c
        near = [self._left(each) <= most and not _below_slowdown(each) for each in pair]
        if len(near) < 2 or not all(near):
            return ""
        heat, limit = (gpu.now.sample.get(s) for s in (Signal.TEMPERATURE_C, Signal.SHUTDOWN_AT_C))
        return f"{heat:.0f} C, and it switches itself off at {limit:.0f} C"

    def _left(self, gpu: Gpu) -> float:
        heat, limit = gpu.get(Signal.TEMPERATURE_C), gpu.get(Signal.SHUTDOWN_AT_C)
        if heat is None or heat >= self.limits.possible_c or limit is None or limit <= 0:
            return float("inf")
        return limit - heat

    def _too_hot(self, gpu: History[Gpu], sample: NvmlSample) -> str:
        now = gpu.now.sample
        heat = now.get(Signal.TEMPERATURE_C) or 0.0
        if _at_slowdown(now):
            return f"{heat:.0f} C, where the GPU slows itself down"
        if heat >= self.limits.hot_c:
            return f"{heat:.0f} C; {self.limits.hot_c:.0f} C is hot for any GPU"
        return self._above_others(gpu, sample)

    def _above_others(self, gpu: History[Gpu], sample: NvmlSample) -> str:
        times = self.limits.samples
        heats = [each.sample.get(Signal.TEMPERATURE_C) or 0.0 for each in (*gpu.past, gpu.now)]
        others = [
            heat
            for other in sample.gpus
            if other.pci != gpu.now.sample.pci
            and (heat := other.get(Signal.TEMPERATURE_C)) is not None
        ]
        if len(heats) < times or not others:
            return ""
        coolest = min(heats[-times:])
        if coolest < mean(others) + self.limits.above_others_c:
            return ""
        return f"{coolest:.0f} C in {times} samples, its neighbours have {mean(others):.0f} C"


def _below_slowdown(gpu: Gpu) -> bool:
    heat, limit = gpu.get(Signal.TEMPERATURE_C), gpu.get(Signal.SLOWDOWN_AT_C)
    return heat is not None and limit is not None and limit > 0 and heat < limit


def _at_slowdown(gpu: Gpu) -> bool:
    heat, limit = gpu.get(Signal.TEMPERATURE_C), gpu.get(Signal.SLOWDOWN_AT_C)
    if heat is not None and limit is not None and limit > 0:
        return heat >= limit
    margin, slow = gpu.get(Signal.MARGIN_C), gpu.get(Signal.SLOWDOWN_MARGIN_C)
    return margin is not None and slow is not None and slow < 0 and margin <= slow
