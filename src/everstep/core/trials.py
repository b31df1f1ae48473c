"""Whether a code version can be put in place, and its trial before that: rules.

One machine imports a new version before anything is stopped for it. What does not import is
refused; of what nothing can be told, three times, is put in place with that remark.
"""

from __future__ import annotations

from collections.abc import Iterator

from everstep.actions import ControllerAction, RefuseUpdate, TryVersion
from everstep.core import spreading
from everstep.core.deciding import Deciding
from everstep.core.history import Condition, VersionBook
from everstep.core.spreading import HOLDS_MAX, can_run, everybody_has, failed_to_get, spares
from everstep.core.state import Machine, State
from everstep.core.versions import asked_for, built_on_bad, named, pending, running, span, within
from everstep.events import VersionHeld, VersionNotHeld, VersionTried
from everstep.model import NO_VERSION, Seconds, VersionId

TRIALS_MAX = 3
"""Trials of which nothing can be told, before the version is taken as it is."""


# --- answers -------------------------------------------------------------------------------------


def version_held(state: State, event: VersionHeld, now: Seconds) -> None:
    """One more machine has it."""
    spreading.held(state, event)
    _mark(state, state.versions.get(event.version), now)


def version_not_held(state: State, event: VersionNotHeld, now: Seconds) -> None:
    """One machine could not get it."""
    spreading.not_held(state, event, now)
    _mark(state, state.versions.get(event.version), now)


def version_tried(state: State, event: VersionTried, now: Seconds) -> None:
    """It was imported once, or could not be, or nobody knows."""
    order = state.outstanding.get(event.action)
    if not isinstance(order, TryVersion) or order.version != event.version:
        return
    del state.outstanding[event.action]
    book = state.versions[order.version]
    if event.untold:
        book.untold.append(f"{event.machine}: {event.untold}")
    elif event.problem:
        book.problem, book.detail = f"{event.problem} (on {event.machine})", event.detail
    else:
        book.tried = True
    book.elsewhere = event.elsewhere or book.elsewhere
    _mark(state, book, now)


def _mark(state: State, book: VersionBook | None, now: Seconds) -> None:
    """For people: rules ask anew, since machines come and go."""
    if book is None or len(book.asked) > len(book.not_held):
        return  # some have not answered yet
    if book.condition in (Condition.PENDING, Condition.READY):
        ready = is_ready(state, book, now)
        book.condition = Condition.READY if ready else Condition.PENDING


# --- whether it can be put in place --------------------------------------------------------------


def is_ready(state: State, book: VersionBook, now: Seconds) -> bool:
    """It was tried, and those who run ranks have it: nothing is waited for any more."""
    return is_tried(state, book, now) and everybody_has(state, book.code.version, now)


def is_tried(state: State, book: VersionBook, now: Seconds) -> bool:
    """Nothing speaks against it, as far as can be told."""
    if objection(state, book):
        return False
    return book.tried or book.untried or told_by(state, book, now) >= TRIALS_MAX


def told_by(state: State, book: VersionBook, now: Seconds) -> int:
    """Trials that told nothing, the one included that is not answered in time."""
    overdue = _trial_of(state, book) is not None and now >= _trial_until(state, book)
    return len(book.untold) + overdue


def objection(state: State, book: VersionBook) -> str:
    """Why it cannot be put in place, ever; empty if it can."""
    if state.job.code.version == NO_VERSION:
        why = state.job.code.why_none or "no version of it was taken"
        return f"the job's code is not versioned: {why}"
    if book.problem:
        return f"it does not import: {book.problem}"
    bad = built_on_bad(state, book)
    if bad is not None:
        what = "was rolled back" if bad.condition is Condition.ROLLED_BACK else "was refused"
        return (
            f"it is built on {named(state, bad.code.version)}, which {what}; send the change again,"
            " and it is based on what runs"
        )
    missed = _made_without(state, book)
    if missed is not None:
        when = "was put in place" if missed.condition is Condition.RUNNING else "was sent"
        return (
            f"it was made without {named(state, missed.code.version)}, which {when} a moment"
            " before and would be undone; send the change again, and it is based on that one"
        )
    for machine in (state.machines[name] for name in state.positions.values()):
        if machine.versions is None:
            return (
                f"the agent of {machine.machine} is of an everstep that cannot change code: start"
                " that machine's agent anew with this one"
            )
    return cannot_everywhere(state, book)


def _made_without(state: State, book: VersionBook) -> VersionBook | None:
    """One that was sent before it and waits, or has just been put in place, and is not in it: both
    were made at once.
    """
    known = within(state, book)
    before = (each for each in pending(state) if each.event < book.event)
    missed = next((each for each in before if each not in known), None)
    if missed is not None:
        return missed
    based_on = {version for each in (book, *known) for version in _made_of(each)}
    runs = running(state)
    return None if state.version in based_on or NO_VERSION in based_on else runs


def _made_of(book: VersionBook) -> tuple[VersionId, ...]:
    return (book.code.base, *book.code.includes)


def new_term(state: State, now: Seconds) -> None:
    """Whoever tries one may have had nobody to answer to."""
    for book in pending(state):
        if _trial_of(state, book) is not None:
            book.trial_at = now


def cannot_everywhere(state: State, book: VersionBook) -> str:
    """Why some members will never run it, whoever takes their place; empty if all may."""
    version = book.code.version
    names = [name for name, failed in book.not_held.items() if failed >= HOLDS_MAX]
    members = [m for m in map(state.machines.get, names) if m is not None]
    members = [m for m in members if m.node_rank is not None and not can_run(state, m, version)]
    if len(members) <= len(spares(state, version)):
        return ""
    why = failed_to_get(state, members[0], version)
    return f"{members[0].machine}: {why}, and no standby can take its place"


# --- trying --------------------------------------------------------------------------------------


def try_pending(d: Deciding) -> list[ControllerAction]:
    """Have it imported; refuse what does not import, or cannot be put in place anyhow."""
    if d.now < spreading.crowded_until(d.state):
        return []
    waiting = pending(d.state)
    refused: list[ControllerAction] = [
        _refusal(d, book, why) for book in waiting if (why := objection(d.state, book))
    ]
    return refused or [order for book in waiting for order in _trial(d, book)]


def _refusal(d: Deciding, book: VersionBook, why: str) -> RefuseUpdate:
    return RefuseUpdate(
        id=d.id(),
        cause=d.event,
        why=f"{named(d.state, book.code.version)} is not put in place: {why}"
        f" ({asked_for(book, d.now)})",
        version=book.code.version,
        detail=book.detail,
    )


def _trial(d: Deciding, book: VersionBook) -> Iterator[TryVersion]:
    state = d.state
    if is_tried(state, book, d.now):
        return
    if _trial_of(state, book) is not None and d.now < _trial_until(state, book):
        return
    machine = _tries(state, book)
    if machine is None:
        return
    beside = machine.node_rank is not None
    where = "beside its ranks" if beside else "which has no ranks"
    why = f"{machine.machine}, {where}, imports {named(state, book.code.version)} before it runs"
    untold = [*book.untold, *([""] if told_by(state, book, d.now) > len(book.untold) else [])]
    if untold:
        trials = "the trial" if len(untold) == 1 else f"{len(untold)} trials"
        why += f"; of {trials} before nothing could be told ({untold[-1] or 'no answer'})"
    yield TryVersion(
        id=d.id(),
        cause=str(book.event),
        why=why,
        machine=machine.machine,
        version=book.code.version,
        within_s=state.job.policy.try_within_s,
        beside_ranks=beside,
    )


def _tries(state: State, book: VersionBook) -> Machine | None:
    """A ready standby, else the last member that has it; where it was tried least.

    A standby that is just getting it is waited for: it disturbs nobody's training.
    """
    ready = [m for m in state.standbys() if m.ready and m.versions is not None]
    order = [
        *ready,
        *reversed(state.members()),
        *(machine for machine in state.standbys() if not machine.ready),
    ]
    has = [
        machine
        for machine in order
        if machine.connected and machine.versions is not None
        if book.code.version in machine.versions
    ]
    if any(m not in has and m.machine not in book.not_held for m in ready):
        return None
    return min(has, key=lambda machine: book.tried_on.get(machine.machine, 0), default=None)


def _trial_of(state: State, book: VersionBook) -> TryVersion | None:
    order = state.outstanding.get(book.trial)
    return order if isinstance(order, TryVersion) else None


def _trial_until(state: State, book: VersionBook) -> Seconds:
    policy = state.job.policy
    return book.trial_at + policy.try_within_s + policy.agent_return_s


def try_version(state: State, action: TryVersion, now: Seconds) -> None:
    """A machine was told to try it. Of an order before that was not answered, nothing is told."""
    book = state.versions[action.version]
    former = _trial_of(state, book)
    if former is not None:
        del state.outstanding[former.id]
        within_s = span(now - book.trial_at)
        book.untold.append(f"{former.machine}: it did not answer within {within_s}")
    state.outstanding[action.id] = action
    book.trials += 1
    book.trial, book.trial_at = action.id, now
    book.tried_on[action.machine] = book.tried_on.get(action.machine, 0) + 1


def deadlines(state: State) -> Iterator[Seconds]:
    """When a trial is given up."""
    for book in pending(state):
        if _trial_of(state, book) is not None:
            yield _trial_until(state, book)
