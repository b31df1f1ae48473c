"""When training became slower, or one rank holds up all others: what looking.py looks into.

slowdown.py tells falling speed for the checks; here it is what is done about it when no check knows
why. Nothing is stopped for it unless somebody is named and a standby is ready: slow training is
training. And not twice: if it is slow after others went for it, it was not they.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from everstep.actions import ControllerAction, PageHuman, Rung
from everstep.core import over_eviction
from everstep.core.aggregate import Taken, flagged
from everstep.core.deciding import Deciding
from everstep.core.group_of import count, machines_named, of_one_kind
from everstep.core.groups import Layout
from everstep.core.guards import too_many_restarts
from everstep.core.look_state import Look, Straggler, Watching
from everstep.core.state import Phase, State
from everstep.looks import LookResult, Purpose
from everstep.model import MachineId, Rank, Seconds, Value
from everstep.sightings import StragglerSeen

COSTS = 0.1
"""A rank that costs so much of each step is worth a restart: a minute, every some hours."""
CHANCE = 0.05
"""A group goes only if what it is flagged for is less likely than this to be chance."""
SAID_MAX = 3
"""Groups that a sentence names."""
STRAGGLER = "straggler"


class Slow(Value, frozen=True, kw_only=True):
    """What a look at slow training leads to."""

    result: LookResult
    why: str
    flags: tuple[str, ...] = ()
    """Groups that this round flags."""
    machines: tuple[MachineId, ...] = ()
    ranks: tuple[Rank, ...] = ()
    group: str = ""


def straggler_seen(state: State, event: StragglerSeen, now: Seconds) -> None:
    """A rank holds up all others, or does no more."""
    if event.generation != state.generation:
        return
    if event.rank is None or event.machine is None:
        state.straggler = None
        return
    known = state.straggler
    same = known is not None and known.rank == event.rank
    state.straggler = Straggler(
        rank=event.rank,
        machine=event.machine,
        at=known.at if known is not None and same else now,
        event=state.seq,
        why=event.why or f"rank {event.rank} holds up all others",
        costs=event.costs,
    )


# --- when ----------------------------------------------------------------------------------------


def due(d: Deciding) -> str:
    """Why slow training is to be looked into now; empty: it is not."""
    state = d.state
    if not _could_act(state, d.now):
        return ""
    straggler = _lasting(state, d.now)
    if straggler is not None and not _against(state, straggler, d.now):
        return straggler.why
    pace = state.pace
    return f"training became slower: {pace.told}" if _told_lately(state) else ""


def _could_act(state: State, now: Seconds) -> bool:
    runs = state.phase is Phase.RUNNING and not state.failures and not state.exits
    if not (runs and state.job.policy.looks) or (
        state.straggler is None and not _told_lately(state)
    ):
        return False
    return not too_many_restarts(state, now) and not _in_vain(state, now)


def _told_lately(state: State) -> bool:
    """Of these ranks, and not looked into yet."""
    told_at, since = state.pace.told_at, state.running_since
    return told_at is not None and since is not None and told_at > max(since, state.pace.looked_at)


def _in_vain(state: State, now: Seconds) -> bool:
    """Whether ranks were stopped for slow training lately: if it still is, it was not they who
    went; and who had to stay has to stay again.
    """
    since = now - state.job.policy.fails_again_s
    return any(
        taken.rung is not Rung.AGGREGATE and taken.failure == Purpose.SLOW and taken.at > since
        for incident in reversed(state.incidents)
        for taken in incident.rungs
    )


def _lasting(state: State, now: Seconds) -> Straggler | None:
    """The rank that holds up all others, long enough and by enough."""
    straggler = state.straggler
    if straggler is None or now < _lasts_at(state, straggler):
        return None
    explains = state.pace.slow_since is not None or _told_lately(state)
    return straggler if straggler.costs >= COSTS or explains else None


def _lasts_at(state: State, straggler: Straggler) -> Seconds:
    policy = state.job.policy
    return straggler.at + policy.slow_flags * policy.slow_every_s


def _against(state: State, straggler: Straggler, now: Seconds) -> str:
    """Why its machine stays; empty: it may go."""
    if straggler.machine not in state.positions.values():
        return f"{straggler.machine} is not of the job any more"
    return over_eviction.objection(state, [straggler.machine], "", now)


def deadlines(state: State) -> Iterator[Seconds]:
    """When somebody has held up the others for long enough."""
    if state.straggler is not None:
        yield _lasts_at(state, state.straggler)


def tell(d: Deciding) -> list[ControllerAction]:
    """Of a rank that holds up all others, and stays."""
    state, straggler = d.state, d.state.straggler
    if straggler is None or d.now < _lasts_at(state, straggler):
        return []
    about = f"{STRAGGLER} {straggler.rank}"
    if about in state.paged:
        return []
    costs = f"it costs {straggler.costs:.0%} of each step"
    against = _against(state, straggler, d.now)
    if _lasting(state, d.now) is None:
        against = f"that is less than {COSTS:.0%}"
    elif not _could_act(state, d.now):
        against = "others went for it lately, or restarts brought no progress"
    why = f"{straggler.why}; {costs}; {against}, so {straggler.machine} goes on"
    return [PageHuman(id=d.id(), cause=str(straggler.event), why=why, about=about)]


# --- what a look leads to ------------------------------------------------------------------------


def conclude(d: Deciding, watching: Watching, look: Look, taken: Taken) -> Slow:
    """The rank that holds up all others; else, of several rounds, the group flagged most often."""
    state = d.state
    straggler = _lasting(state, d.now)
    if straggler is not None:
        return _by_time(state, straggler, d.now)
    if _as_fast_as_before(state, watching):
        return Slow(result=LookResult.WENT_ON, why="training is as fast as it was before")
    if not _told_lately(state):
        return Slow(result=LookResult.WENT_ON, why="no rank holds up the others any more")
    flags = flagged(taken)
    rounds = state.job.policy.slow_rounds
    said = f"round {look.round} of {rounds} flags {' and '.join(flags) or 'no group'}"
    if look.round < rounds:
        return Slow(result=LookResult.AGAIN, why=said, flags=flags)
    if state.straggler is not None:  # measured, while stacks only show who waits
        return _by_time(state, state.straggler, d.now)
    counts = dict(watching.flags)
    for group in flags:
        counts[group] = counts.get(group, 0) + 1
    return _by_flags(state, counts, taken.layout, d.now)


def _as_fast_as_before(state: State, watching: Watching) -> bool:
    """By the time per step. Of a small loss, that does not show."""
    pace, fast_at = state.pace, state.pace.fast_again_at
    return pace.slow_since is None and fast_at is not None and fast_at > watching.since


def _by_time(state: State, straggler: Straggler, now: Seconds) -> Slow:
    against = _against(state, straggler, now)
    if against:
        why = f"{straggler.why}; {against}, so {straggler.machine} goes on"
        return Slow(result=LookResult.NOTHING, why=why)
    return Slow(
        result=LookResult.MACHINES,
        why=f"{straggler.why}: it costs {straggler.costs:.0%} of each step",
        machines=(straggler.machine,),
        ranks=(straggler.rank,),
    )


def _by_flags(state: State, counts: dict[str, int], layout: Layout | None, now: Seconds) -> Slow:
    policy = state.job.policy
    most = max(counts.values(), default=0)
    often = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:SAID_MAX]
    said = ", ".join(f"{group} in {times}" for group, times in often)
    of = f"of {policy.slow_rounds} rounds of looks"
    if most < policy.slow_flags:
        why = f"training is slower, and {of} none flags one group {policy.slow_flags} times"
        return Slow(result=LookResult.NOTHING, why=f"{why} ({said or 'none at all'})")
    first = [group for group, times in counts.items() if times == most]
    if layout is not None and by_chance(counts, first[0], layout, policy.slow_rounds):
        why = f"training is slower, and {of} flag one group as another ({said})"
        return Slow(result=LookResult.NOTHING, why=f"{why}: as often as it happens by chance")
    names = _in_all(state, layout, first)
    group = first[0] if len(first) == 1 else ""
    called = " and ".join(sorted(first))
    if not names:
        why = f"training is slower; {called} are flagged alike and have no machine in common"
        return Slow(result=LookResult.NOTHING, why=why)
    against = over_eviction.objection(state, names, group, now)
    why = f"training is slower, and {of} {most} flag {called}"
    if against:
        return Slow(result=LookResult.NOTHING, why=f"{why}; {against}, so all go on")
    return Slow(result=LookResult.MACHINES, why=why, machines=tuple(names), group=group)


def by_chance(counts: dict[str, int], group: str, layout: Layout, rounds: int) -> bool:
    """Whether some group of its kind would be flagged as often if each round flagged any of them:
    ranks that train are found here and there. If all are slower, nobody is to blame.
    """
    groups, most = count(layout, group), counts[group]
    flags = sum(times for other, times in counts.items() if of_one_kind(group, other))
    share = min(1.0, flags / (rounds * groups))
    tail = sum(
        math.comb(rounds, n) * share**n * (1 - share) ** (rounds - n)
        for n in range(most, rounds + 1)
    )
    return groups * tail > CHANCE


def _in_all(state: State, layout: Layout | None, groups: Sequence[str]) -> list[MachineId]:
    """The machines that all these groups are on."""
    if layout is None:
        return []
    members = [machines_named(layout, group) for group in groups]
    common = sorted(frozenset.intersection(*members))
    return [state.positions[n] for n in common if n in state.positions]
