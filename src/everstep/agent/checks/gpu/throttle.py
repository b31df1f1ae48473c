"""GPUs whose clocks the hardware holds down, for heat or for want of power.

Bits that are ignored: idle, clocks that somebody has set, and the power cap, which every GPU at
full work runs into.
"""

from __future__ import annotations

from everstep.agent.checks.check import History, Limits
from everstep.agent.checks.gpu.per_gpu import PerGpu
from everstep.agent.checks.gpu.samples import Gpu, NvmlSample, Signal
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Counts, Result
from everstep.model import Seconds

POWER_BRAKE = 0x80
REASONS = {
    POWER_BRAKE: "power brake from outside",
    0x40: "heat (hardware)",
    0x20: "heat (software)",
    0x08: "hardware slowdown",
}
"""nvmlClocksEventReason*: those that tell of trouble."""


class ThrottleLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of gpu.throttle."""

    window_s: Seconds = 120.0
    """Seconds that are looked at."""
    share: float = 0.5
    """Share of the samples in it: clocks that are held down now and then cost little. gpud warns
    from 6 of 60 samples in 10 minutes; this is later but over less time."""
    least: int = 3
    """Samples for a verdict."""


class Throttle(PerGpu[ThrottleLimits]):
    """Slowed by its hardware for a good part of the time."""

    name = "gpu.throttle"
    about = "clocks are not held down by heat or power (NVML's clock event reasons)"
    limits_type = ThrottleLimits
    keep = 15

    def judge_gpu(self, gpu: History[Gpu], sample: NvmlSample) -> Result | None:
        now = gpu.now.sample
        if now.get(Signal.CLOCK_REASONS) is None:
            return None
        seen = [_reasons(each.sample) for each in gpu.since(self.limits.window_s)]
        held = [bits for bits in seen if bits]
        share = len(held) / len(seen)
        if len(seen) < self.limits.least or share < self.limits.share:
            return self.passed("clocks are free", item=now.name, throttled_share=share)
        bits = max(held, key=held.count)
        names = ", ".join(name for bit, name in REASONS.items() if bits & bit)
        return self.found(
            Verdict.WARN,
            Category.MFU_DECLINE,
            f"clocks held down in {len(held)} of {len(seen)} samples: {names}",
            "Check the rack's power." if bits & POWER_BRAKE else "Check the cooling.",
            item=now.name,
            counts=Counts.WITH_SLOWDOWN,
            cause="power brake" if bits & POWER_BRAKE and _on_most(sample) else "",
            values={"throttled_share": share},
        )


def _reasons(gpu: Gpu) -> int:
    bits = int(gpu.get(Signal.CLOCK_REASONS) or 0)
    return bits & sum(REASONS)


def _on_most(sample: NvmlSample) -> bool:
    """Most GPUs at once: then the supply of the machine or the rack is short, not one GPU's."""
    braked = [gpu for gpu in sample.gpus if _reasons(gpu) & POWER_BRAKE]
    return len(braked) > len(sample.gpus) / 2
