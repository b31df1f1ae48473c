"""When another code version is put in place, and which one is rolled back to: rules.

    restart_for      why ranks that run are stopped for other code, if they are
    put_in_place     with the ranks stopped, the next generation gets the newest one that is ready
    rollback_target  what the ladder may go back to

An urgent update is put in place when all machines that run ranks, and all ready standbys, have it,
and one of them has imported it. A lazy one rides on the next restart, or is put in place when its
time is over. Each is built on those that waited before it, so the newest that is ready has them in
it. What a person rolls back to goes before all updates. (versions.py has the books, spreading.py
brings versions to machines.)
"""

from __future__ import annotations

from collections.abc import Iterator

from everstep.actions import ControllerAction, PageHuman, Rung, SwitchCode
from everstep.core.deciding import Deciding, Planned
from everstep.core.history import Condition, VersionBook
from everstep.core.spreading import can_run, crowded_until, everybody_has, standbys_have
from everstep.core.state import Phase, State
from everstep.core.trials import cannot_everywhere, is_ready, is_tried
from everstep.core.versions import (
    LOSSES,
    ROLLBACK,
    asked_for,
    last_good,
    named,
    pending,
    ran_s,
    rollback_asked_for,
    running,
    span,
    steps_of,
    within,
)
from everstep.model import NO_STEP, Seconds, Value, VersionId


class Target(Value, frozen=True, kw_only=True):
    """The version to roll back to, or why there is none."""

    version: VersionId | None
    why: str


# --- rollback ------------------------------------------------------------------------------------


def rollback_target(state: State, now: Seconds, failure: str) -> Target:
    """What the ladder may roll back to for this class of failure. Not too often in one incident.

    Not if code is not what broke: what runs has run for long, or this class of failure came before
    it ran.
    """
    runs = running(state)
    if runs is None or len(state.versions) == 1:
        return Target(version=None, why="there is no earlier version of the code")
    most = state.job.policy.rollbacks_max
    rungs = state.incident.rungs if state.incident is not None else []
    done = sum(taken.rung is Rung.ROLLBACK and taken.failure != Rung.ROLLBACK for taken in rungs)
    if done >= most:
        return Target(version=None, why=f"code was rolled back {done} times in this incident")
    target = last_good(state)
    if target is None:
        return Target(version=None, why="no earlier version of the code ran well")
    name = named(state, state.version)
    lasted_s = ran_s(runs, now)
    if lasted_s >= state.job.policy.recent_code_s:
        why = f"{name} has run for {span(lasted_s)}, so it is not what broke"
        return Target(version=None, why=why)
    before = _came_before(state, runs, failure, now)
    if before:
        return Target(version=None, why=f"{before}, so {name} is not what broke")
    back = named(state, target.code.version)
    steps, ago = steps_of(target), span(now - (target.runs[-1].until or now))
    why = (
        f"back to {back}, which did {steps} steps until {ago} ago; {name} did {steps_of(runs)} in"
        f" {span(lasted_s)}"
    )
    return Target(version=target.code.version, why=why)


def _came_before(state: State, runs: VersionBook, failure: str, now: Seconds) -> str:
    """Whether this class of failure was seen before what runs was put in place, not long ago.

    Under code that was rolled back for it, it says nothing: the next may have the same in it.
    """
    since = now - state.job.policy.recent_code_s
    for taken in (taken for each in reversed(state.incidents) for taken in each.starts):
        book = state.versions.get(taken.version)
        if book is None or book is runs or book.condition is Condition.ROLLED_BACK:
            continue
        if taken.failure == failure and since <= taken.at <= runs.runs[-1].since:
            other = named(state, taken.version)
            return f"{failure} came under {other} as well, {span(now - taken.at)} ago"
    return ""


def _requested(state: State) -> tuple[VersionBook | None, str]:
    """What a person wants back, or why that cannot be."""
    request = state.rollback
    if request is None or request.version is None:
        target = last_good(state)
        if target is None:
            return None, "no earlier version of the code ran well"
        against = cannot_everywhere(state, target)
        return (None, against) if against else (target, "")
    book = state.versions.get(request.version)
    if book is None:
        return None, f"{request.version[:8]!r} is no code version of this job"
    if request.version == state.version:
        return None, f"{named(state, request.version)} is what runs"
    if not book.runs:
        return None, f"{named(state, request.version)} never ran: it is {book.condition}"
    against = cannot_everywhere(state, book)
    return (None, against) if against else (book, "")


def _roll_back(d: Deciding, target: VersionBook) -> SwitchCode:
    """To an earlier one; or to one that was dropped before: that says nothing against what runs."""
    state, version = d.state, target.code.version
    return SwitchCode(
        id=d.id(),
        cause=str(state.rollback_event),
        why=f"back from {named(state, state.version)} to {named(state, version)}:"
        f" {rollback_asked_for(state, d.now)}",
        version=version,
        previous=state.version,
        rolled_back=target.condition is not Condition.ROLLED_BACK,
    )


# --- updates -------------------------------------------------------------------------------------


def restart_for(d: Deciding) -> Planned | None:
    """Ranks that run are stopped for other code now; None: they are not."""
    state = d.state
    if d.now < crowded_until(state):
        return None
    if state.rollback is not None:
        target, _ = _requested(state)
        if target is not None and everybody_has(state, target.code.version, d.now):
            asked = rollback_asked_for(state, d.now)
            why = f"rollback to {named(state, target.code.version)}: {asked}"
            return Planned(rung=Rung.ROLLBACK, why=why)
    for book in reversed(pending(state)):
        if _presses(state, book, d.now) and _can_begin(state, book, d.now):
            return Planned(rung=Rung.HOT_UPDATE, why=_why_now(state, book, d.now))
    return None


def _can_begin(state: State, book: VersionBook, now: Seconds) -> bool:
    if not is_ready(state, book, now) or not standbys_have(state, book.code.version):
        return False
    return not book.overlap or _old_enough(state, book)


def _presses(state: State, book: VersionBook, now: Seconds) -> bool:
    """Ranks are stopped for it. A lazy one lets a recovery be proven first."""
    incident = state.incident
    opened_for_it = (
        incident is not None and incident.planned and incident.generation == state.generation
    )
    return book.urgent or (now >= book.due_at and (incident is None or opened_for_it))


def _why_now(state: State, book: VersionBook, now: Seconds) -> str:
    why = f"update to {named(state, book.code.version)}: {asked_for(book, now)}"
    return why if book.urgent else f"{why} and no restart came within {span(now - book.at)}"


def put_in_place(d: Deciding) -> list[ControllerAction]:
    """Ranks are stopped, and a newer version is ready: the next generation runs it.

    Not in a recovery that goes back to an earlier one: nothing else shall change with it.
    """
    state = d.state
    if state.phase is not Phase.STOPPING or state.awaiting or not state.full:
        return []
    if state.rollback is not None:
        target, _ = _requested(state)
        return [_roll_back(d, target)] if target is not None else []
    rungs = state.incident.rungs if state.incident is not None else []
    if rungs and rungs[-1].rung is Rung.ROLLBACK and rungs[-1].generation == state.generation:
        return []
    chosen = next((book for book in reversed(pending(state)) if _goes(state, book, d.now)), None)
    if chosen is None:
        return []
    return [
        SwitchCode(
            id=d.id(),
            cause=str(chosen.event),
            why=_why(state, chosen, d.now),
            version=chosen.code.version,
            previous=state.version,
        )
    ]


def _goes(state: State, book: VersionBook, now: Seconds) -> bool:
    """It is ready; or it is time for it, and nobody failed to get it who lacks it yet.

    For those the start waits: that costs less than another stop.
    """
    if is_ready(state, book, now):
        return True
    if not (book.urgent or now >= book.due_at) or not is_tried(state, book, now):
        return False
    return all(
        can_run(state, machine, book.code.version)
        or (machine.connected and machine.machine not in book.not_held)
        for machine in state.members()
    )


def _why(state: State, book: VersionBook, now: Seconds) -> str:
    why = f"{named(state, book.code.version)} instead of {named(state, state.version)}:"
    why += f" {asked_for(book, now)}"
    others = [each for each in within(state, book) if each in pending(state)]
    if others:
        names = [named(state, each.code.version) for each in others]
        why += f"; it has the changes of {', '.join(names)} in it"
    overlap = max(each.overlap for each in (book, *others))
    if overlap:
        why += f"; {overlap} steps are to be done again, and their losses compared"
    if book.untried and not book.tried:
        why += "; nobody tried to import it, as was asked for"
    elif not book.tried:
        why += f"; nothing could be told of its import in {book.trials} trials"
        why += f" ({book.untold[-1]})" if book.untold else ""
    return why


def tell(d: Deciding) -> list[ControllerAction]:
    """What people asked for and cannot have, and losses that came out otherwise."""
    state = d.state
    if state.rollback is not None:
        target, against = _requested(state)
        if target is None:
            why = f"there is no rollback, since {against}; {rollback_asked_for(state, d.now)}"
            cause = str(state.rollback_event)
            return [PageHuman(id=d.id(), cause=cause, why=why, about=ROLLBACK)]
    runs = running(state)
    if runs is not None and runs.to_tell:
        return [PageHuman(id=d.id(), cause=d.event, why=runs.to_tell, about=LOSSES)]
    return []


# --- steps that are done again -------------------------------------------------------------------


def _old_enough(state: State, book: VersionBook) -> bool:
    """Whether a step is kept that lies far enough back, or none can be waited for."""
    if state.furthest == NO_STEP or not (state.published or _makes_copies(state)):
        return True
    kept = [each.step for each in state.published]
    kept += [state.safe.step] if state.safe is not None else []
    return any(step <= state.furthest - book.overlap for step in kept)


def _makes_copies(state: State) -> bool:
    return not state.job.checkpoint.disk_every.never and not state.disk.failed


def waits_for_copy(state: State, now: Seconds) -> VersionBook | None:
    """The update for which a step has to lie on disk, and then to grow old enough."""
    for book in reversed(pending(state)):
        if book.overlap and _presses(state, book, now) and is_ready(state, book, now):
            return None if _old_enough(state, book) else book
    return None


# --- time ----------------------------------------------------------------------------------------


def deadlines(state: State) -> Iterator[Seconds]:
    """When a lazy update has waited for long enough."""
    yield from (book.due_at for book in pending(state) if not book.urgent)
