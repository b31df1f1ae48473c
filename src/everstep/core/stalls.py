"""When nothing advances for longer than it should: what looking.py looks into.

Pure functions of what is noted here of steps, phases and activity. A stall is no failure yet: it
only costs a look. What a job's own past shows to be usual is no stall: steps, phases that ranks
tell of, starts, pauses that ended by themselves.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence

from everstep.core import phases
from everstep.core.look_state import Took, Watching
from everstep.core.state import Phase, State
from everstep.events import StepProgress
from everstep.looks import Purpose
from everstep.model import NO_STEP, RankPhase, Seconds, Value
from everstep.sightings import ActivitySeen

STEPS_MAX = 100
"""Times per step that are the recent past: one a second at most."""
KEPT = 5
"""The longest of so many recent pauses counts, and so many of the longest phases are known."""
PAUSE_COUNTS_S: Seconds = 2 * 3600.0
"""A pause that was over by itself counts for so long: an odd one makes nobody patient for ever."""
PHASE_COUNTS_S: Seconds = 86400.0
"""How long a phase took counts for so long, or until the next one of its kind."""
TAIL = 0.99
"""The share of steps that take no longer than what is usual."""
LONGER = 1.5
"""So many times the longest pause that ended by itself is patience enough for the next one."""
LONG = phases.LONG | {RankPhase.ENDED}
"""Phases that take longer than a step, as the end of a script does."""
A_MINUTE = 6
"""So many times the least patience: a start gets it, and a slow storage, say."""


class Stall(Value, frozen=True, kw_only=True):
    """Nothing advances, or will not have for too long at `at`."""

    since: Seconds
    at: Seconds
    """When patience ends."""
    why: str
    """One clause with its numbers."""
    quiet: bool = False
    """Known from what ranks do, not from steps."""


# --- taking note ---------------------------------------------------------------------------------


def progress_seen(state: State, event: StepProgress, now: Seconds) -> None:
    """Learn how long steps and phases take. Before the step in `event` is noted."""
    patience = state.patience
    patience.told_at = now
    told = event.attached or event.phase in LONG or event.finished_by_one > NO_STEP
    if told:
        patience.attached = event.generation
    if event.finished_by_all > state.finished_by_all:
        if event.step_s is not None and 0 < event.step_s < math.inf:
            patience.steps = [*patience.steps, event.step_s][-STEPS_MAX:]
        if state.finished_by_all == NO_STEP:
            reached = max(state.progress_at, now - max(0.0, event.age_s))
            _learn(state, RankPhase.STARTING, reached - state.progress_at, now)
    _change_phase(state, event.phase, now - max(0.0, event.phase_s))


def _change_phase(state: State, phase: RankPhase, since: Seconds) -> None:
    """The end of a long phase is a sign of life, as its beginning is."""
    patience = state.patience
    phase = phase if phase in LONG else RankPhase.TRAINING
    if phase is patience.phase:
        return
    if patience.phase in LONG:
        _learn(state, patience.phase, since - patience.phase_since, since)
    patience.phase, patience.phase_since = phase, since


def _learn(state: State, phase: RankPhase, took_s: Seconds, now: Seconds) -> None:
    """Short ones, as of a small save in every step, push out no longer one that comes rarely."""
    known = state.patience.longest.get(phase, [])
    lately = [each for each in known if each.at > now - PHASE_COUNTS_S]
    kept = sorted([*lately, Took(max(0.0, took_s), now)], key=lambda each: each.seconds)
    state.patience.longest[phase] = kept[-KEPT:]


def _longest(pauses: Iterable[Took], now: Seconds) -> Seconds:
    """Of those that count at a moment."""
    return max((each.seconds for each in pauses if each.at > now - PAUSE_COUNTS_S), default=0.0)


def member_heard(state: State, now: Seconds) -> None:
    """Somebody who was silent is heard of again."""
    state.patience.heard_at = now


def activity_seen(state: State, event: ActivitySeen, now: Seconds) -> None:
    """For how long the job has been quiet."""
    if event.generation != state.generation:
        return
    patience = state.patience
    began_anew = now - event.quiet_s > _quiet_since(state) + 1.0
    if patience.quiet_s > 0 and (event.quiet_s <= 0 or began_anew):
        lasted_s = max(patience.quiet_s, now - event.quiet_s - _quiet_since(state))
        patience.quiet_before = [*patience.quiet_before, Took(lasted_s, now)][-KEPT:]
    patience.quiet_s, patience.quiet_at = event.quiet_s, now
    patience.no_traffic_s = event.no_traffic_s


def went_on(state: State, watching: Watching) -> None:
    """A stall was over by itself: the next one like it is no stall.

    How long starts, phases that ranks tell of and quiet times take is learned by themselves.
    """
    between_steps = watching.step > NO_STEP and watching.phase not in LONG
    if between_steps and not watching.quiet:
        pause_s = max(0.0, advanced_at(state) - watching.since)
        state.patience.went_on = [*state.patience.went_on, Took(pause_s, advanced_at(state))][
            -KEPT:
        ]


def ranks_start(state: State) -> None:
    """What was learned outlives a restart; what goes on does not."""
    patience = state.patience
    patience.phase, patience.phase_since = RankPhase.TRAINING, 0.0
    patience.quiet_s, patience.quiet_at, patience.no_traffic_s = 0.0, 0.0, None
    state.straggler = state.judged = None


# --- asked by looking.py -------------------------------------------------------------------------


def stall(state: State) -> Stall | None:
    """The stall that there is, or will be if nothing happens; None: nothing can stand still."""
    if not _could_stand_still(state):
        return None
    if state.finished_by_all > NO_STEP:
        return _of_steps(state)
    return min(_before_steps(state), key=lambda each: each.at, default=None)


def _could_stand_still(state: State) -> bool:
    """All ranks run, as far as is known, and enough machines are heard of to say more."""
    runs = state.phase is Phase.RUNNING and state.full and state.finish is None
    return (
        state.job.policy.looks
        and runs
        and not state.failures
        and not state.exits
        and not _is_blind(state)
    )


def _heard_since(state: State) -> Seconds:
    """Since when a lack of progress says something: that of somebody who was silent is not known
    before all have told again.
    """
    patience = state.patience
    unheard = patience.told_at < patience.heard_at
    return max(state.heard_since, patience.heard_at) if unheard else state.heard_since


def _is_blind(state: State) -> bool:
    """Whether progress could not be known: too many are silent, or somebody has been ever since
    this controller heard of any machine, and all have to tell before there is a report.
    """
    if not any(state.machines[name].node_rank is not None for name in state.silent):
        return False
    return cut_off(state) or state.patience.told_at < state.heard_since


def cut_off(state: State) -> bool:
    """More than half of the job is silent: that says more of the controller than of the job."""
    silent = sum(state.machines[name].node_rank is not None for name in state.silent)
    return 2 * silent > state.job.nnodes


def is_over(state: State, watching: Watching) -> bool:
    """Whether something advanced since, or ranks end."""
    if state.exits:
        return True
    if watching.quiet and state.finished_by_one == NO_STEP:
        return state.patience.quiet_s <= 0 or _quiet_since(state) > watching.since + 1.0
    return advanced_at(state) > watching.since


def advanced_at(state: State) -> Seconds:
    """When a step was finished last, or ranks began something else."""
    return max(state.progress_at, state.advanced_at, state.patience.phase_since)


def advances(state: State, now: Seconds) -> bool:
    """Whether the next step is on its way, as far as is known; of who tells of none, anything."""
    if state.finished_by_one == NO_STEP:
        return state.patience.quiet_s <= 0
    limit_s, _ = _limit(state)
    return now - advanced_at(state) < limit_s


def _quiet_since(state: State) -> Seconds:
    return state.patience.quiet_at - state.patience.quiet_s


def _of_steps(state: State) -> Stall:
    phase, since = state.patience.phase, advanced_at(state)
    limit_s, by = _limit(state)
    doing = f"ranks say that they are {phase}, and n" if phase in LONG else "n"
    return Stall(
        since=since,
        at=max(since, _heard_since(state)) + limit_s,
        why=f"{doing}o step was finished for {limit_s:.3g} s after step {state.finished_by_all}"
        f" ({by})",
    )


def _before_steps(state: State) -> Iterator[Stall]:
    """A start that takes too long; or ranks that never tell of steps, and do nothing any more."""
    patience, policy = state.patience, state.job.policy
    earlier = patience.longest.get(RankPhase.STARTING, [])
    since = advanced_at(state)
    if earlier or patience.attached == state.generation:
        limit_s, by = _times(state, earlier, "the longest start before")
        # Another machine may lack what the ones before had in their caches.
        limit_s = min(max(limit_s, A_MINUTE * policy.stall_min_s), policy.stall_max_s)
        if patience.phase in LONG:
            limit_s, by = max((limit_s, by), _phase_limit(state))
        yield Stall(
            since=since,
            at=max(since, _heard_since(state)) + limit_s,
            why=f"ranks run for {limit_s:.3g} s and have not finished a first step ({by})",
        )
    if patience.quiet_s > 0:
        since = max(_quiet_since(state), state.phase_since)
        limit_s = max(policy.quiet_s, LONGER * _longest(patience.quiet_before, since))
        limit_s = min(limit_s, max(policy.stall_max_s, policy.quiet_s))
        yield Stall(
            since=since,
            at=max(since, _heard_since(state)) + limit_s,
            why=f"no rank has done anything for {limit_s:.3g} s: none printed a line, and they used"
            f" no processor time or had no traffic{_without_traffic(patience.no_traffic_s)}",
            quiet=True,
        )


def _without_traffic(seconds: Seconds | None) -> str:
    return f" (none for {seconds:.0f} s)" if seconds is not None and seconds >= 1.0 else ""


def _limit(state: State) -> tuple[Seconds, str]:
    """Patience with the next step, and where it comes from."""
    usual = _usual(state)
    if state.patience.phase in LONG:
        return max(usual, _phase_limit(state))
    return usual


def _usual(state: State) -> tuple[Seconds, str]:
    patience, policy = state.patience, state.job.policy
    # A state that was kept by a version that did not learn yet knows only how long steps take.
    tail_s = _tail(patience.steps) if patience.steps else state.step_s or 0.0
    paused_s = _longest(patience.went_on, advanced_at(state))
    choices = [
        (policy.stall_min_s, f"steps take {tail_s:.3g} s"),
        (policy.stall_factor * tail_s, f"{policy.stall_factor:g} times the {tail_s:.3g} s a step"),
        (LONGER * paused_s, f"a pause of {paused_s:.3g} s was over by itself before"),
    ]
    # Of steps that usually take very long, the bound would be no patience at all.
    usual_s = statistics.median(patience.steps) if patience.steps else 0.0
    most = (max(policy.stall_max_s, LONGER * usual_s), "the most patience there is")
    return min(max(choices), most)


def _phase_limit(state: State) -> tuple[Seconds, str]:
    phase = state.patience.phase
    return _times(state, state.patience.longest.get(phase, []), f"the longest {phase} before")


def _times(state: State, earlier: Sequence[Took], what: str) -> tuple[Seconds, str]:
    policy = state.job.policy
    most_s = policy.stall_max_s
    if not earlier:
        return most_s, "the most patience there is, since nothing is known of it yet"
    longest_s = max(each.seconds for each in earlier)
    limit_s = max(policy.stall_min_s, policy.stall_factor * longest_s)
    return min(limit_s, most_s), f"{what} took {longest_s:.3g} s"


def longer_step_s(state: State) -> Seconds:
    """Within so long a job that works finishes a step."""
    steps = state.patience.steps
    return LONGER * _tail(steps) if steps else 0.0


def _tail(values: Iterable[Seconds]) -> Seconds:
    """The 99th percentile, by nearest rank."""
    ordered = sorted(values)
    return ordered[math.ceil(TAIL * len(ordered)) - 1]


def due(state: State, now: Seconds) -> Stall | None:
    """The stall that is to be looked into now."""
    watched = state.watching is not None and state.watching.purpose is Purpose.HANG
    found = None if watched else stall(state)
    return found if found is not None and found.at <= now else None
