"""The escalation ladder: what a recovery does, cheapest explanation first.

A failure has a ground, which is what is known of its cause when all ranks have stopped:

    machine   something speaks against machines, or they are gone
    code      the program itself raised it
    numbers   loss or gradients are not finite
    hang      nothing advances, or everything does so slowly
    unknown   a crash, and nothing points anywhere

The first failure of an incident takes the first rung of its ground that can be taken. A rung may
have a result within the same recovery (tests name machines, or name none), and then the next one
follows at once. One of them is taken while ranks still run, and stops nothing by itself: the stacks
of all are compared as soon as nothing advances (looking.py); what they show is what the recovery
goes on with, if there is one. If ranks fail again before the restart is proven, by the same class
of failure and with no machine evidence of its own, the ladder climbs from where that class stood.
Another failure joins the incident at its own ground's rung and moves the ladder neither way: at a
failure every 18 minutes, one recovery in four meets one. What fails again within half an hour of a
proven restart climbs too, but no further than to a rollback: a job that advances is not given up.

The table below is ByteRobust's Figure 5 in those words; docs/ladder.md draws it. A rung that
cannot be taken is skipped, and the decision says why. Whatever the table says, the guards
(guards.py) end what brings no progress: then a human gets the whole story.
"""

from __future__ import annotations

from enum import StrEnum

from everstep.actions import Rung
from everstep.core.evidence import Judged, is_users, judged
from everstep.core.failures import failure_class, first_own
from everstep.core.over_eviction import went_for
from everstep.core.state import FailureKind, Incident, RungTaken, State
from everstep.core.updates import rollback_target
from everstep.looks import LookResult
from everstep.model import Seconds, Value, VersionId


class Ground(StrEnum):
    """What is known of a failure's cause."""

    MACHINE = "machine"
    CODE = "code"
    NUMBERS = "numbers"
    HANG = "hang"
    UNKNOWN = "unknown"


class Result(StrEnum):
    """What came of a rung."""

    NAMED = "machines are named"
    CODE = "the program did it"
    NOTHING = "nothing is found"
    SAME_BITS = "the same bits"
    OTHER_BITS = "other bits"
    FAILS_AGAIN = "fails again"


class Row(Value, frozen=True, kw_only=True):
    """One line of the table: after this, the first of these that can be taken."""

    after: Rung | Ground
    result: Result | None = None
    """None for a ground."""
    take: tuple[Rung, ...]


LADDER: tuple[Row, ...] = (
    Row(after=Ground.MACHINE, take=(Rung.EVICT,)),
    Row(after=Ground.CODE, take=(Rung.ROLLBACK, Rung.REATTEMPT)),
    Row(after=Ground.NUMBERS, take=(Rung.RERUN, Rung.TEST, Rung.REATTEMPT)),
    Row(after=Ground.HANG, take=(Rung.AGGREGATE, Rung.TEST, Rung.REATTEMPT)),
    Row(after=Ground.UNKNOWN, take=(Rung.TEST, Rung.REATTEMPT)),
    # Results within the same recovery.
    Row(after=Rung.RERUN, result=Result.SAME_BITS, take=(Rung.ROLLBACK, Rung.REATTEMPT)),
    Row(after=Rung.RERUN, result=Result.OTHER_BITS, take=(Rung.TEST, Rung.REPLAY)),
    Row(after=Rung.AGGREGATE, result=Result.NAMED, take=(Rung.EVICT_AGGREGATED,)),
    Row(
        after=Rung.AGGREGATE,
        result=Result.CODE,
        take=(Rung.ROLLBACK, Rung.TEST, Rung.REATTEMPT),
    ),
    Row(after=Rung.AGGREGATE, result=Result.NOTHING, take=(Rung.TEST, Rung.REATTEMPT)),
    Row(after=Rung.TEST, result=Result.NAMED, take=(Rung.EVICT_TESTED,)),
    Row(after=Rung.TEST, result=Result.NOTHING, take=(Rung.REATTEMPT,)),
    Row(after=Rung.REPLAY, result=Result.NAMED, take=(Rung.EVICT_REPLAYED,)),
    Row(after=Rung.REPLAY, result=Result.NOTHING, take=(Rung.HUMAN,)),
    # The same failure again, before the restart was proven.
    Row(after=Rung.EVICT, result=Result.FAILS_AGAIN, take=(Rung.TEST, Rung.REATTEMPT)),
    Row(after=Rung.EVICT_AGGREGATED, result=Result.FAILS_AGAIN, take=(Rung.TEST, Rung.REATTEMPT)),
    Row(
        after=Rung.EVICT_TESTED,
        result=Result.FAILS_AGAIN,
        take=(Rung.ROLLBACK, Rung.REPLAY, Rung.REATTEMPT),
    ),
    Row(
        after=Rung.REATTEMPT,
        result=Result.FAILS_AGAIN,
        take=(Rung.ROLLBACK, Rung.REPLAY, Rung.REATTEMPT),
    ),
    Row(
        after=Rung.ROLLBACK,
        result=Result.FAILS_AGAIN,
        take=(Rung.ROLLBACK, Rung.REPLAY, Rung.REATTEMPT),
    ),
    Row(after=Rung.EVICT_REPLAYED, result=Result.FAILS_AGAIN, take=(Rung.HUMAN,)),
    Row(after=Rung.HOT_UPDATE, result=Result.FAILS_AGAIN, take=(Rung.ROLLBACK, Rung.REATTEMPT)),
    Row(after=Rung.RESIZE, result=Result.FAILS_AGAIN, take=(Rung.TEST, Rung.REATTEMPT)),
)

NOT_YET = {
    Rung.RERUN: "a step cannot be rerun yet",
    Rung.TEST: "machines are not tested yet while the job waits",
    Rung.REPLAY: "steps cannot be replayed yet",
}
"""Rungs whose place in the ladder is kept: what takes them is to come."""
HEIGHT = {
    Rung.EVICT: 0,
    Rung.HOT_UPDATE: 0,
    Rung.RESIZE: 0,
    Rung.RERUN: 1,
    Rung.AGGREGATE: 1,
    Rung.EVICT_AGGREGATED: 1,
    Rung.TEST: 2,
    Rung.EVICT_TESTED: 2,
    Rung.REATTEMPT: 3,
    Rung.ROLLBACK: 4,
    Rung.REPLAY: 5,
    Rung.EVICT_REPLAYED: 5,
    Rung.HUMAN: 6,
}
"""For one class of failure it never grows less until a restart is proven, but for evictions, for
what people ask for, for looks at ranks that run, and for a reattempt where nothing higher can be
taken."""
OF_MACHINES = frozenset({Rung.EVICT, Rung.EVICT_AGGREGATED})
"""After these, the program is named as at first."""
AFTER_PROOF = HEIGHT[Rung.ROLLBACK]
"""No higher for a failure that comes again although a restart was proven in between."""
CHANGES = frozenset({Rung.HOT_UPDATE, Rung.RESIZE})
"""After these, any failure is theirs until they are proven."""
USERS_OWN = frozenset(
    {
        "AssertionError",
        "AttributeError",
        "ImportError",
        "IndentationError",
        "IndexError",
        "KeyError",
        "ModuleNotFoundError",
        "NameError",
        "NotImplementedError",
        "RecursionError",
        "SyntaxError",
        "TypeError",
        "UnboundLocalError",
        "ValueError",
        "ZeroDivisionError",
    }
)
"""Exceptions that a program raises by what it says, on any machine."""


_BY_KIND = {
    FailureKind.LOST: Ground.MACHINE,
    FailureKind.NUMBERS: Ground.NUMBERS,
    FailureKind.HANG: Ground.HANG,
}


class Climb(Value, frozen=True, kw_only=True):
    """What a recovery takes, and why."""

    rung: Rung
    failure: str
    """Class of the failure."""
    why: str
    version: VersionId | None = None
    """What a rollback goes back to."""


def climb(state: State, incident: Incident, now: Seconds) -> Climb:
    """The rung for a failure whose ranks have all stopped; with every position's evidence told."""
    found = judged(state)
    failure = failure_class(state, found)
    ground, looked = ground_of(state, found), _looked(state)
    named = ground is Ground.MACHINE or looked is Result.NAMED
    former = None if named else stands_at(state, incident, failure, now)
    if looked is Result.CODE and former is not None and former.taken.rung in OF_MACHINES:
        former = None  # this time it is known that it was none
    if former is None and looked is not None and state.judged is not None:
        row = _row(Rung.AGGREGATE, looked)
        stay = looked is Result.NOTHING and state.judged.machines
        because = f"{failure}: {state.judged.verdict}" + ("; they have to stay" if stay else "")
    elif former is None:
        row = _row(ground, None)
        because = f"{failure}: {_GROUNDS[ground]}"
    else:
        row = _row(former.taken.rung, Result.FAILS_AGAIN)
        again = "fails again" if former.proven is None else "comes again"
        because = f"{failure}: it {again} after {_named(former.taken)}"
        if former.proven is not None:
            because += f", {now - former.taken.at:.0f} s later and although {former.proven} steps"
            because += " were done in between"
    rungs = [r for r in row.take if former is None or former.proven is None or _low(r)]
    skipped: list[str] = []
    for rung in rungs:
        choice = _choice(state, rung, failure, now)
        if not choice.against:
            why = "; ".join([because, *skipped, choice.does])
            return Climb(rung=rung, failure=failure, why=why, version=choice.version)
        skipped.append(choice.against)
    why = "; ".join([because, *skipped, "so it is tried again"])
    return Climb(rung=Rung.REATTEMPT, failure=failure, why=why)


def may_roll_back(state: State, failure: str, now: Seconds) -> bool:
    """Whether a rollback is left for this class of failure."""
    return not _choice(state, Rung.ROLLBACK, failure, now).against


class _Choice(Value, frozen=True, kw_only=True):
    """What would come of taking a rung."""

    against: str = ""
    """Why it cannot be taken now; empty if it can."""
    does: str = ""
    version: VersionId | None = None


def _choice(state: State, rung: Rung, failure: str, now: Seconds) -> _Choice:
    if rung is Rung.AGGREGATE:
        return _Choice(against="stacks can be compared only of ranks that run")
    if rung is not Rung.ROLLBACK:
        return _Choice(against=NOT_YET.get(rung, ""), does=_DOES.get(rung, str(rung)))
    if failure == FailureKind.NOT_STARTED:
        return _Choice(against="ranks that cannot be started have run no code")
    target = rollback_target(state, now, failure)
    if target.version is None:
        return _Choice(against=target.why)
    return _Choice(does=target.why, version=target.version)


# --- where a class of failure stands -------------------------------------------------------------


class _Stand(Value, frozen=True, kw_only=True):
    taken: RungTaken
    proven: int | None
    """None: its restart is not proven. Else the new steps that were done since."""


def stands_at(state: State, incident: Incident, failure: str, now: Seconds) -> _Stand | None:
    """The last rung that was taken for this class of failure; None: it is a first one."""
    last = incident.starts[-1] if incident.starts else None
    in_vain = last is not None and last.rung is Rung.HOT_UPDATE and last.version == state.version
    if last is not None and last.rung in CHANGES and not in_vain:
        return _Stand(taken=last, proven=None)
    mine = [taken for taken in incident.starts if taken.failure == failure]
    if mine:
        return _Stand(taken=mine[-1], proven=None)
    return _before(state, failure, now)


def _before(state: State, failure: str, now: Seconds) -> _Stand | None:
    """The same class in an earlier incident, not long ago and under the same code."""
    since = now - state.job.policy.fails_again_s
    for earlier in reversed(state.incidents[:-1]):
        if earlier.closed_at is None or earlier.closed_at < since:
            return None
        mine = [taken for taken in earlier.starts if taken.failure == failure]
        if mine and mine[-1].version == state.version and mine[-1].at >= since:
            return _Stand(taken=mine[-1], proven=max(0, state.furthest - earlier.furthest))
    return None


# --- what a failure is ---------------------------------------------------------------------------


def ground_of(state: State, found: Judged | None) -> Ground:
    """What is known of the cause, now that everybody has stopped and told."""
    if any(each.member and each.at >= state.phase_since for each in state.evictions):
        return Ground.MACHINE
    first = first_own(state)
    if first is None:
        return Ground.UNKNOWN
    if first.kind in _BY_KIND:
        return _BY_KIND[first.kind]
    if found is not None:
        return Ground.CODE if is_users(found) else Ground.UNKNOWN
    by_itself = first.error is not None and first.error.kind in USERS_OWN
    return Ground.CODE if by_itself else Ground.UNKNOWN


def _looked(state: State) -> Result | None:
    """What came of comparing the stacks of ranks that stood still; None: something else failed.

    Machines that are named and have to stay are as good as nobody: no standby is ready, say.
    """
    first, look = first_own(state), state.judged
    if first is None or first.kind is not FailureKind.HANG or look is None:
        return None
    if look.result is LookResult.CODE:
        return Result.CODE
    return Result.NAMED if went_for(state) else Result.NOTHING


# --- words ---------------------------------------------------------------------------------------

_GROUNDS = {
    Ground.MACHINE: "machines are to blame or gone",
    Ground.CODE: "the program raised it itself",
    Ground.NUMBERS: "training's numbers are worth nothing",
    Ground.HANG: "training does not advance",
    Ground.UNKNOWN: "nothing points at a machine or at code",
}


_DOES: dict[Rung, str] = {
    Rung.EVICT: "others take their positions",
    Rung.EVICT_AGGREGATED: "others take the positions of those who are named",
    Rung.REATTEMPT: "it is tried again",
}


def _named(taken: RungTaken) -> str:
    return f"{taken.rung} (generation {taken.generation})"


def told(incident: Incident) -> str:
    """All that was tried, for the human who gets the story."""
    rungs = [f"{_named(taken)}: {taken.failure}" for taken in incident.rungs]
    return "; ".join(rungs)


def _row(after: Rung | Ground, result: Result | None) -> Row:
    for row in LADDER:
        if row.after == after and row.result == result:
            return row
    return Row(after=after, result=result, take=(Rung.REATTEMPT,))


def _low(rung: Rung) -> bool:
    return HEIGHT[rung] <= AFTER_PROOF
