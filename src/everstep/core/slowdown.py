"""Whether training slowed down lately: what makes a hot GPU a fault (ByteRobust, 8.1.1).

Two witnesses. The time per step, which every attached script tells: here. The judge of training's
own numbers, which knows more of them: what it tells is noted here. Asked by alerts.py.
"""

from __future__ import annotations

import statistics

from everstep.core.state import State
from everstep.diagnosis.abnormal import Kind
from everstep.events import MetricAbnormal
from everstep.model import Seconds

USUAL_MAX = 60
"""Reports (one a second) that are the recent past."""
USUAL_MIN = 20
"""Fewer are no past to compare with."""
NEWEST = 5
"""The median of so many newest reports is compared: one long step is no slow-down."""
SETTLING = 5
"""Reports after a start that say nothing of speed."""


def step_took(state: State, step_s: Seconds | None, now: Seconds) -> None:
    """Take note of the newest time per step, in a generation that trains."""
    pace = state.pace
    if step_s is None or step_s <= 0:
        return
    if pace.settling:
        pace.settling -= 1
        return
    pace.newest = [*pace.newest, step_s][-NEWEST:]
    if len(pace.newest) < NEWEST:
        return
    takes = statistics.median(pace.newest)
    usual = statistics.median(pace.usual) if len(pace.usual) >= USUAL_MIN else takes
    slow = takes > state.job.policy.slowed * usual
    if slow and pace.slow_since is None:
        pace.slow_since = now
        pace.why = f"steps take {takes:.3g} s, usually {usual:.3g} s"
    elif not slow and pace.slow_since is not None:
        pace.slow_since, pace.fast_again_at = None, now
    if not slow or _long_since(state, now):
        pace.usual = [*pace.usual, step_s][-USUAL_MAX:]


def _long_since(state: State, now: Seconds) -> bool:
    """What lasts is the new normal: other data, other lengths of sequences."""
    since = state.pace.slow_since
    return since is not None and since < now - state.job.policy.slowed_within_s


def speed_fell(state: State, event: MetricAbnormal, now: Seconds) -> None:
    if event.kind in (Kind.SLOW, Kind.RAMP, Kind.SAG) and event.generation == state.generation:
        state.pace.told_at, state.pace.told = now, event.why


def ranks_start(state: State) -> None:
    """What was usual outlives a restart; what is newest does not."""
    state.pace.newest = []
    state.pace.settling = SETTLING
    state.pace.slow_since = None


def slowed(state: State, since: Seconds) -> tuple[Seconds, str] | None:
    """When training slowed down and by how much, if that was after `since` and is not over."""
    pace = state.pace
    if pace.slow_since is not None and pace.slow_since > since:
        return pace.slow_since, pace.why
    if pace.told_at is not None and pace.told_at > since:
        return pace.told_at, pace.told
    return None
