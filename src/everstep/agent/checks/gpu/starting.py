"""A driver that takes too long to start: it hangs in NVML's first call.

A start is no silence to the sources, since cold GPUs take their time; here is for how long.
"""

from __future__ import annotations

from everstep.agent.checks.check import Here, Limits
from everstep.agent.checks.gpu.library import hung
from everstep.health import Result
from everstep.model import Seconds


class StartLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of checks that see the driver start."""

    start_s: Seconds = 60.0
    """Seconds. Eight cold GPUs without persistence mode take 10 to 30."""
    start_in_use_s: Seconds = 10.0
    """Seconds while ranks run here: their GPUs are warm, and a start takes one."""


def judge_start(
    check: str, limits: StartLimits, here: Here, starting_s: Seconds, driver: str
) -> Result | None:
    """A driver that hangs; None: it may still be starting."""
    most = limits.start_in_use_s if here.pids else limits.start_s
    return hung(check, driver, starting_s) if starting_s >= most else None
