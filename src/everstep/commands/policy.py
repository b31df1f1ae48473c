"""What the flags of `everstep run` say of how failures are judged: restarts, and stalls.

Used by plan.py. Everything else that a job decides by stays at its default.
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from everstep.commands.flags import RunFlags
from everstep.model import PolicySpec, Seconds, UserError

STALL_LEAST_S: Seconds = 1.0
"""Agents tell of steps once a second: a shorter limit would look into every pause between two."""
_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_LIMIT = re.compile(r"(\d+)([smh]?)(?::(\d+)([smh]?))?")


def read_policy(flags: RunFlags) -> PolicySpec:
    """The job's policy. Raises UserError."""
    policy = PolicySpec(looks=not flags.no_hang_detection)
    if flags.max_restarts is not None:
        policy = replace(policy, recoveries_max=flags.max_restarts)
    if flags.stall_limit:
        least, most = _stall_limit(flags.stall_limit)
        policy = replace(policy, stall_min_s=least, stall_max_s=most)
    return policy


def _stall_limit(text: str) -> tuple[Seconds, Seconds]:
    """The shortest and the longest time without a step that is no stall."""
    match = _LIMIT.fullmatch(text)
    if match is None:
        raise UserError(f"--stall-limit {text} is no time: write 30s, 10m, or 30s:20m.")
    least = float(match[1]) * _UNITS_S[match[2]]
    most = float(match[3]) * _UNITS_S[match[4]] if match[3] else None
    if least < STALL_LEAST_S:
        raise UserError(
            f"--stall-limit {text}: the shortest time is {STALL_LEAST_S:g} s or more; to turn it "
            "off, give --no-hang-detection."
        )
    if most is not None and most < least:
        raise UserError(f"--stall-limit {text}: the longest time is shorter than the shortest.")
    return least, max(least, PolicySpec().stall_max_s) if most is None else most
