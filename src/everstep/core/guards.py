"""When not to restart again: everstep never loops for ever.

Called by core/rules.py when the current generation is broken. Each guard returns a GiveUp with the
sentence for the user, or None. Order: the user's own error at the start, ranks that end early again
and again, numbers that are bad again and again, too many recoveries without progress.
"""

from __future__ import annotations

from msgspec.structs import replace

from everstep.core.accusers import Group, groups_of
from everstep.core.alerts import accusations
from everstep.core.evidence import is_users, judged
from everstep.core.failures import failure_class, is_echo
from everstep.core.ladder import may_roll_back
from everstep.core.state import State
from everstep.model import Seconds, Value

EXCUSES_MAX = 2
"""Restarts in one incident for a machine that is accused and yet stays where it is: each costs a
start, and a standby may come meanwhile. After more of them the program is believed to be wrong."""


UNUSABLE = "CheckpointUnusable"
"""trainer/checkpoint.py: no copy of the step that the rank was to restore is good."""


class GiveUp(Value, frozen=True, kw_only=True):
    """The job ends as failed."""

    why: str
    detail: str = ""
    page: bool
    """Whether a human is to be told that this is not understood."""


def give_up(state: State, now: Seconds) -> GiveUp | None:
    """The first guard that speaks against another restart.

    What the program seems to have done itself may be a machine's doing if a member is accused.
    """
    return (
        _programs_own(state, now)
        or _early_exits(state)
        or _bad_numbers(state)
        or _too_many(state, now)
    )


def _programs_own(state: State, now: Seconds) -> GiveUp | None:
    """Not while a machine that may have done it goes, or has not been tried again often enough."""
    verdict = _user_error(state) or _same_error_again(state)
    if verdict is None or may_roll_back(state, failure_class(state, judged(state)), now):
        return None
    accused = _accused_members(state, now)
    if not accused:
        return verdict
    if any(not group.against for group in accused) or _recoveries(state) < EXCUSES_MAX:
        return None
    first = accused[0]
    why = f"{verdict.why}; besides, {first.why}; {first.against}"
    return replace(verdict, why=why, page=True)


def _accused_members(state: State, now: Seconds) -> list[Group]:
    return [
        group
        for group in groups_of(state, accusations(state, now), now)
        if any(state.machines[name].node_rank is not None for name in group.machines)
    ]


def _recoveries(state: State) -> int:
    """Of the open incident, so far."""
    return state.incident.recoveries if state.incident is not None else 0


def _user_error(state: State) -> GiveUp | None:
    """A Python exception before any step was ever done: doing it again changes nothing.

    A rank that died of a signal, or a machine that is gone, may be the cause of any exception.
    """
    if state.proven or any(f.error is None for f in state.failures):
        return None
    if any(f.error is not None and f.error.kind == UNUSABLE for f in state.failures):
        return None  # another copy may be good
    own = [f for f in state.failures if not is_echo(f)]
    if not own or own[0].error is None:
        return None
    first, recoveries = own[0], _recoveries(state)
    tried = "Nothing was retried, because no step was ever finished"
    if recoveries:
        tried = f"No step was ever finished, in {recoveries + 1} generations"
    return GiveUp(
        why=f"the script failed before its first step: {first.text}. {tried}; correct the script"
        " and start again",
        detail=own[0].error.traceback,
        page=False,
    )


def _same_error_again(state: State) -> GiveUp | None:
    """The program failed in the same way twice, and no step was done in between.

    Data and code fail again at the same place; a machine would have said something of itself.
    """
    incident, found = state.incident, judged(state)
    if incident is None or found is None or not is_users(found) or found.rule != incident.rule:
        return None
    if state.furthest > incident.furthest:
        return None
    return GiveUp(
        why=f"the same error twice after step {state.furthest}, also after a restart:"
        f" {found.sentence}",
        detail=_detail(state),
        page=True,
    )


def _early_exits(state: State) -> GiveUp | None:
    """The same ranks end with 0 while the others cannot go on without them, twice."""
    early = [rank for rank, status in state.exits.items() if status.ok]
    if not early or early != state.early_exits or not state.failures:
        return None
    ranks = ", ".join(map(str, sorted(early)))
    return GiveUp(
        why=f"rank {ranks} ended with exit code 0 while other ranks still trained, in two"
        f" generations in a row, and then {state.failures[0].text}: every rank must run the same"
        " number of steps",
        detail=_detail(state),
        page=False,
    )


def _bad_numbers(state: State) -> GiveUp | None:
    """Counted by themselves: every attempt reaches a new step before its numbers are bad again."""
    numeric = state.numeric
    if numeric is None or numeric.generation != state.generation:
        return None
    if numeric.times <= state.job.policy.recoveries_max:
        return None
    return GiveUp(
        why=f"{state.failures[0].text}, for the {numeric.times}th time, although older and older"
        " steps were restored: a human has to look at data, code and machines",
        page=True,
    )


def too_many_restarts(state: State, now: Seconds) -> bool:
    """Whether ranks that run are left alone, since stopping them has brought no progress lately."""
    policy = state.job.policy
    restarts = [*state.recoveries, *state.stops]
    lately = [at for at in restarts if at > now - policy.recoveries_window_s]
    return len(lately) >= policy.recoveries_max


def _too_many(state: State, now: Seconds) -> GiveUp | None:
    """At most so many recoveries without progress, then a human."""
    policy = state.job.policy
    recent = [at for at in state.recoveries if at > now - policy.recoveries_window_s]
    if len(recent) < policy.recoveries_max:
        return None
    last = state.failures[0].text if state.failures else "a machine was lost"
    return GiveUp(
        why=f"{len(recent)} recoveries in {policy.recoveries_window_s / 60:g} minutes brought no"
        f" new step after step {state.furthest}, the last one ended because {last}: a human has to"
        " look",
        detail=_detail(state),
        page=True,
    )


def _detail(state: State) -> str:
    """The first traceback that is no echo, else the last output of a failed rank."""
    own = [f for f in state.failures if f.error is not None and not is_echo(f)]
    if own and own[0].error is not None:
        return own[0].error.traceback
    return next((f.last_lines for f in state.failures if f.last_lines), "")
