"""A GPU that runs slower than its neighbours at the same work, whatever the reason."""

from __future__ import annotations

from statistics import median

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.gpu.per_gpu import under_load
from everstep.agent.checks.gpu.samples import Gpu, NvmlSample, Signal
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Counts, Result


class ClocksLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of gpu.clocks."""

    share: float = 0.8
    """Of the median of this machine's GPUs under load; power alone makes a few percent."""
    samples: int = 5
    """Samples in a row."""
    gpus: int = 3
    """GPUs under load for a median that means something."""


class Clocks(Check[NvmlSample, ClocksLimits]):
    """Clock of the SMs against the machine's median."""

    name = "gpu.clocks"
    source = "nvml"
    about = "no GPU under load runs at lower clocks than its neighbours (NVML)"
    limits_type = ClocksLimits
    keep = 12

    def judge(self, here: Here, history: History[NvmlSample]) -> list[Result]:
        del here
        if history.now.sample.silent_as_a_whole:
            return [self.could_not_run(history.now.sample.silent_as_a_whole)]
        every = [each.sample for each in (*history.past, history.now)][-self.limits.samples :]
        medians = [self._median(sample) for sample in every]
        return [
            self._of_one(gpu, every, medians)
            for gpu in history.now.sample.gpus
            if gpu.get(Signal.SM_CLOCK_MHZ) is not None
        ]

    def _of_one(self, gpu: Gpu, every: list[NvmlSample], medians: list[float]) -> Result:
        clock = gpu.get(Signal.SM_CLOCK_MHZ) or 0.0
        slow = [
            other
            for sample, typical in zip(every, medians, strict=True)
            for other in sample.gpus
            if other.pci == gpu.pci and under_load(other) and self._is_slow(other, typical)
        ]
        if len(slow) < self.limits.samples:
            return self.passed(f"{clock:.0f} MHz", item=gpu.name, sm_clock_mhz=clock)
        return self.found(
            Verdict.WARN,
            Category.MFU_DECLINE,
            f"{clock:.0f} MHz under load in {len(slow)} samples, its neighbours run at"
            f" {medians[-1]:.0f} MHz",
            "Look for locked clocks (nvidia-smi -q -d CLOCK), power limits and heat.",
            item=gpu.name,
            counts=Counts.WITH_SLOWDOWN,
            values={"sm_clock_mhz": clock},
        )

    def _is_slow(self, gpu: Gpu, typical: float) -> bool:
        clock = gpu.get(Signal.SM_CLOCK_MHZ)
        return clock is not None and clock < self.limits.share * typical

    def _median(self, sample: NvmlSample) -> float:
        clocks = [
            clock
            for gpu in sample.gpus
            if under_load(gpu) and (clock := gpu.get(Signal.SM_CLOCK_MHZ)) is not None
        ]
        return median(clocks) if len(clocks) >= self.limits.gpus else 0.0
