"""GPU memory in use while no rank runs here: orphans of an earlier job, or other people's work."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.gpu.samples import Gpu, NvmlSample, Signal
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result


class MemoryLeftLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of gpu.memory_left."""

    most_mib: float = 1024.0
    """Mebibytes that the driver itself may use: about 600 with ECC on Hopper. Meta's fleet takes
    15 from a counter without the driver's own part."""
    samples: int = 3
    """Samples in a row: ranks that just ended have their memory freed within seconds."""


class MemoryLeft(Check[NvmlSample, MemoryLeftLimits]):
    """Looks only while the job has no rank on this machine."""

    name = "gpu.memory_left"
    source = "nvml"
    about = "no foreign process uses a GPU while the job has no rank here (NVML)"
    limits_type = MemoryLeftLimits
    keep = 2

    def judge(self, here: Here, history: History[NvmlSample]) -> Iterable[Result]:
        now = history.now.sample
        if now.silent_as_a_whole:
            yield self.could_not_run(now.silent_as_a_whole)
        for gpu in now.gpus:
            used = gpu.get(Signal.MEMORY_USED_MIB)
            if used is None:
                continue
            seen = [] if here.pids else self._in_use(gpu, history)
            if len(seen) < self.limits.samples:
                yield self.passed(f"{used:.0f} MiB", item=gpu.name, memory_used_mib=used)
            else:
                yield self._found(gpu, used)

    def _in_use(self, gpu: Gpu, history: History[NvmlSample]) -> list[Gpu]:
        """It in those of the newest samples where it was in use."""
        every = (*history.past, history.now)[-self.limits.samples :]
        return [
            other
            for each in every
            for other in each.sample.gpus
            if other.pci == gpu.pci and self._is_used(other)
        ]

    def _is_used(self, gpu: Gpu) -> bool:
        return bool(gpu.pids) or (gpu.get(Signal.MEMORY_USED_MIB) or 0.0) > self.limits.most_mib

    def _found(self, gpu: Gpu, used: float) -> Result:
        whose = f"processes {', '.join(map(str, gpu.pids))}" if gpu.pids else "nobody to be seen"
        return self.found(
            Verdict.WARN,
            Category.GPU_UNAVAILABLE,
            f"{used:.0f} MiB are in use without a rank of this job, by {whose}",
            "End what is left over of an earlier job; reset the GPU if there is nothing to end.",
            item=gpu.name,
            values={"memory_used_mib": used},
        )
