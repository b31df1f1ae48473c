"""What an abnormal number means for the job: whether it goes on, and what may still be restored.

Used by observe.py. A loss that is not finite ends the generation, and what was saved from then on
is spoiled. Of anything else people are told: a jump or a decline may well be training's own doing.
"""

from __future__ import annotations

from everstep.core.state import Failure, FailureKind, Numeric, Phase, Spoiled, State
from everstep.diagnosis.abnormal import Kind
from everstep.events import MetricAbnormal
from everstep.model import NO_STEP, Seconds, Step

AT_ONCE_STEPS = 2
"""Numbers that are bad within so many steps of the restored one were so before it was saved."""


def bad_numbers(state: State, event: MetricAbnormal, now: Seconds) -> Failure | None:
    """Take note of it; the failure, if the generation cannot go on with such numbers.

    What a script that is not attached prints is only told: none of its steps is kept, to be
    restored.
    """
    over = state.phase is Phase.STOPPING or bool(state.failures)
    if over and event.generation == state.last_started:
        _spoil(state, event)
        return None
    running = state.phase in (Phase.STARTING, Phase.RUNNING)
    if event.generation != state.generation or state.failures or not running:
        return None
    if event.logged or event.kind not in (Kind.NOT_FINITE, Kind.MISSING):
        state.abnormal.append(event)
        return None
    at_once = NO_STEP < state.restored >= event.first_bad - AT_ONCE_STEPS
    at_once = at_once and not _other_code(state)
    step = min(event.first_bad, state.restored) if at_once else event.first_bad
    state.spoiled.append(Spoiled(through=state.generation, step=step))
    state.numeric = Numeric(
        first_bad=event.first_bad,
        generation=state.generation,
        times=1 if state.numeric is None else state.numeric.times + 1,
    )
    text = f"training's numbers are worth nothing: {event.why}"
    return Failure(event=state.seq, at=now, text=text, kind=FailureKind.NUMBERS)


def _spoil(state: State, event: MetricAbnormal) -> None:
    """Told after its ranks had failed of something else: what they saved is worth nothing."""
    known = any(
        each.through >= event.generation and each.step <= event.first_bad for each in state.spoiled
    )
    if event.kind in (Kind.NOT_FINITE, Kind.MISSING) and not event.logged and not known:
        state.spoiled.append(Spoiled(through=event.generation, step=event.first_bad))


def _other_code(state: State) -> bool:
    """Whether this generation is the first of a version that never ran: then that is to blame, and
    not what it restored.
    """
    book = state.versions.get(state.version)
    if book is None or state.incident is None or not state.incident.starts:
        return False
    taken = state.incident.starts[-1]
    new = len(book.runs) == 1 and book.number > 1
    return new and taken.generation == state.generation and book.runs[0].since >= taken.at


def got_past(state: State, finished: Step) -> None:
    """So many steps after the bad one, with nothing bad said: that is over."""
    numeric = state.numeric
    if numeric is not None and finished >= numeric.first_bad + state.job.policy.proven_after_steps:
        state.numeric = None
