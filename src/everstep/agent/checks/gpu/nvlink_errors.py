"""Errors of NVLinks that go on working: an early sign of those that will not."""

from __future__ import annotations

from everstep.agent.checks.check import History, Limits
from everstep.agent.checks.gpu.per_gpu import PerGpu, rise
from everstep.agent.checks.gpu.samples import Gpu, NvmlSample, Signal
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result
from everstep.model import Seconds


class NvLinkErrorsLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of gpu.nvlink_errors; those of DCGM's health check."""

    window_s: Seconds = 60.0
    """Seconds over which errors are counted."""
    recoveries: int = 1
    """Links that had to be trained anew, in the window."""
    replays: int = 1
    """Packets sent again, in the window: worth a note only."""
    crc_per_s: float = 100.0
    """Checksum errors per second."""


class NvLinkErrors(PerGpu[NvLinkErrorsLimits]):
    """Recoveries, checksum errors and replays, all links together."""

    name = "gpu.nvlink_errors"
    about = "NVLinks do not recover, nor repeat packets (NVML fields 38, 45, 52, 59, 215)"
    limits_type = NvLinkErrorsLimits
    keep = 12

    def judge_gpu(self, gpu: History[Gpu], sample: NvmlSample) -> Result | None:
        del sample
        now = gpu.now.sample
        asked = (Signal.NVLINK_RECOVERIES, Signal.NVLINK_CRC_ERRORS, Signal.NVLINK_REPLAYS)
        if not _links(now) or all(now.get(signal) is None for signal in asked):
            return None
        (recoveries, _), (crc, over_s), (replays, _) = (
            rise(gpu, signal, self.limits.window_s) or (0.0, 0.0) for signal in asked
        )
        crc_per_s = crc / over_s if over_s else 0.0
        if recoveries >= self.limits.recoveries:
            return self._found(now, Verdict.SUSPECT, f"NVLinks recovered {recoveries:.0f} times")
        if crc_per_s >= self.limits.crc_per_s:
            why = f"{crc_per_s:.0f} checksum errors a second on NVLinks"
            return self._found(now, Verdict.SUSPECT, why)
        if replays >= self.limits.replays:
            why = f"NVLinks sent {replays:.0f} packets again within {self.limits.window_s:.0f} s"
            return self._found(now, Verdict.WARN, why)
        return self.passed("no new errors", item=now.name)

    def _found(self, now: Gpu, verdict: Verdict, why: str) -> Result:
        do = "Test the machine's NVLinks at the next stop."
        return self.found(verdict, Category.GPU_UNAVAILABLE, why, do, item=now.name)


def _links(gpu: Gpu) -> float:
    return gpu.get(Signal.NVLINKS) or 0.0
