"""PCIe packets that had to be sent again: some are normal, many are a bad link."""

from __future__ import annotations

import math

from everstep.agent.checks.check import History, Limits
from everstep.agent.checks.gpu.per_gpu import PerGpu, rise
from everstep.agent.checks.gpu.samples import Gpu, NvmlSample, Signal
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result
from everstep.model import Seconds

PER_LANE = {1: 0.15, 2: 0.3, 3: 0.48, 4: 0.96, 5: 1.92, 6: 3.84}
"""Replays per minute and lane that a link of a generation may have: DCGM's health check."""


class PcieReplayLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of gpu.pcie_replay."""

    times: float = 1.0
    """Multiple of what DCGM allows for the link."""
    window_s: Seconds = 60.0
    """Seconds over which replays are counted; when the window before was bad as well, the machine
    is suspect."""


class PcieReplay(PerGpu[PcieReplayLimits]):
    """The rate of replays by lanes and generation."""

    name = "gpu.pcie_replay"
    about = "few packets are sent again on the PCIe link (NVML field 94)"
    limits_type = PcieReplayLimits
    keep = 12

    def judge_gpu(self, gpu: History[Gpu], sample: NvmlSample) -> Result | None:
        del sample
        now = gpu.now.sample
        if now.get(Signal.PCIE_REPLAYS) is None:
            return None
        allowed = self._allowed(now)
        window_s = self.limits.window_s
        one, over_s = rise(gpu, Signal.PCIE_REPLAYS, window_s) or (0.0, 0.0)
        if over_s < window_s / 2 or one <= allowed:
            return self.passed("few replays", item=now.name, pcie_replays=one)
        both, _ = rise(gpu, Signal.PCIE_REPLAYS, 2 * window_s) or (0.0, 0.0)
        return self.found(
            Verdict.SUSPECT if both - one > allowed else Verdict.WARN,
            Category.MFU_DECLINE,
            f"{one:.0f} PCIe replays in {over_s:.0f} s, of {allowed:.0f} allowed",
            "Test the machine at the next stop; then reseat the GPU or its riser.",
            item=now.name,
            values={"pcie_replays": one},
        )

    def _allowed(self, gpu: Gpu) -> float:
        generation = int(gpu.get(Signal.PCIE_GENERATION_MAX) or max(PER_LANE))
        lanes = gpu.get(Signal.PCIE_WIDTH) or 16.0
        a_minute = PER_LANE.get(generation, PER_LANE[max(PER_LANE)]) * lanes * self.limits.times
        return math.ceil(a_minute * self.limits.window_s / 60.0)
