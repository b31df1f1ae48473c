"""What follows from a look: a verdict, another look, or that it was no hang.

Asked by looking.py when a look is complete; aggregate.py says what one look shows. A hang is judged
by two looks: what is the same in both stands still. Whoever still moves is never stopped for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from msgspec.structs import replace

from everstep.actions import CloseIncident, ControllerAction, JudgeStacks, PageHuman
from everstep.core import slowness, stalls
from everstep.core.accusers import named
from everstep.core.aggregate import Conclusion, Taken, agree, conclude
from everstep.core.deciding import Deciding
from everstep.core.holding import HALTS
from everstep.core.lasting import Lasts
from everstep.core.layouts import known_layout
from everstep.core.look_state import Look, Watching
from everstep.core.outlying import Key, token_of
from everstep.core.state import State
from everstep.looks import LookResult, Purpose, Ranges, ranks_in
from everstep.model import NO_STEP, MachineId, NodeRank, Rank, Seconds

GOES_ON = frozenset({LookResult.AGAIN, LookResult.WORKS})
"""After these, another look is taken."""
NAMED = frozenset({LookResult.MACHINES, LookResult.CODE})
BETWEEN = "; "
"""Between groups that are flagged together."""
STALL = "stall"
SLOW = "slow"
"""Keys of matters for people."""


def judge(d: Deciding, watching: Watching, look: Look) -> list[ControllerAction]:
    """What a look that is complete means for the matter that it was taken for."""
    if look.purpose is Purpose.ASKED:
        return [_shown(d, look)]
    if look.purpose is Purpose.SLOW:
        return _of_slowness(d, watching, look)
    return _of_stall(d, watching, look)


def taken_of(state: State, look: Look) -> Taken:
    """What a look brought, by positions. Who has not answered when it is judged is silent."""
    at = {machine: node_rank for node_rank, machine in state.positions.items()}
    silent = dict.fromkeys([*look.silent, *look.awaiting])
    unreached = ((at.get(who), at.get(whom)) for who, whom in look.unreached)
    return Taken(
        clusters=tuple(look.clusters),
        stacks=look.stacks,
        stood=tuple(look.stood),
        peers=tuple(look.peers),
        silent=tuple(sorted(at[name] for name in silent if name in at)),
        unreached=tuple((a, b) for a, b in unreached if a is not None and b is not None),
        layout=known_layout(state).layout,
        world_size=state.job.world_size,
        ranks_per_machine=state.job.nproc_per_node,
    )


# --- a stall -------------------------------------------------------------------------------------


def _of_stall(d: Deciding, watching: Watching, look: Look) -> list[ControllerAction]:
    state, policy = d.state, d.state.job.policy
    found, former = conclude(taken_of(state, look)), _former(watching, look)
    again = look.round - _works(watching)
    if found.result is LookResult.WORKS:
        return _works_on(d, watching, look, found.why)
    if former is not None and _moved(former, look, found):
        why = f"{found.why}; but what they show is not what it was in look {former.number}"
        return _works_on(d, watching, look, why)
    accuses = found.result in NAMED
    alike = accuses and former is not None and agree(conclude(taken_of(state, former)), found)
    if not alike and again < policy.looks_max:
        why = f"{found.why}; the next look says whether that lasts" if accuses else found.why
        return [_judged(d, look, LookResult.AGAIN, why, found if accuses else None)]
    given_s = _given_s(state, watching, found.lasts)
    if d.now < watching.since + given_s:
        why = f"{found.why}; that may be over by itself within {given_s:.0f} s"
        return _works_on(d, watching, look, why)
    if alike and former is not None:
        why = f"{_stood(d, watching)}: {found.why}; look {former.number} showed the same"
        elsewhere = _elsewhere(state, found, d.now)
        if elsewhere is not None:
            names = named(elsewhere.machines)
            why += f"; look {elsewhere.number} named the same ranks on {names}: it goes with them"
            why += ", so it is the program"
            found = replace(found, result=LookResult.CODE, machines=(), group="")
        return [_judged(d, look, found.result, why, found)]
    why = f"{_stood(d, watching)}, and {again} looks at all stacks named nobody: {found.why}"
    return [_judged(d, look, LookResult.NOTHING, why)]


def _given_s(state: State, watching: Watching, lasts: Lasts) -> Seconds:
    """How long nothing may advance, by what those do who hold the others up.

    Of a phase that ranks tell of, how long it usually takes is known.
    """
    policy = state.job.policy
    if lasts is Lasts.NO_TIME:
        return 0.0
    if lasts is Lasts.LONG and watching.phase not in stalls.LONG:
        return policy.stall_max_s
    noticed_s = watching.noticed_at - watching.since
    return min(max(stalls.A_MINUTE * policy.stall_min_s, 2 * noticed_s), policy.stall_max_s)


def _elsewhere(state: State, found: Conclusion, now: Seconds) -> Look | None:
    """The look that named the same ranks not long ago, if that was on other machines: a fault of
    hardware does not go with them.

    Once: what comes again after it was taken for the program's is the machine's as well.
    """
    since = now - state.job.policy.fails_again_s
    machines = set(_named(state, found.machines))
    for look in reversed(state.looks):
        mine = look.purpose is Purpose.HANG and set(look.ranks) == set(found.ranks)
        if mine and look.result in NAMED:
            lately = look.judged_at >= since and machines.isdisjoint(look.machines)
            return look if lately and look.machines else None
    return None


def _former(watching: Watching, look: Look) -> Look | None:
    """The look at the same stall before this one."""
    mine = [each for each in watching.looks if each.purpose is look.purpose]
    return mine[-2] if len(mine) > 1 else None


def _works(watching: Watching) -> int:
    return sum(each.result is LookResult.WORKS for each in watching.looks)


def _stood(d: Deciding, watching: Watching) -> str:
    lasted_s = d.now - watching.since
    if watching.quiet:
        return f"no rank does anything for {lasted_s:.0f} s"
    if watching.step == NO_STEP:
        return f"no first step was finished in {lasted_s:.0f} s"
    return f"no step was finished for {lasted_s:.0f} s after step {watching.step}"


def _works_on(d: Deciding, watching: Watching, look: Look, why: str) -> list[ControllerAction]:
    """Left alone, however long it takes; but people are told when that is very long."""
    why = f"{why}; they are left alone"
    actions: list[ControllerAction] = [_judged(d, look, LookResult.WORKS, why)]
    long = d.now - watching.since >= d.state.job.policy.stall_max_s
    if long and STALL not in d.state.paged:
        page = f"{_stood(d, watching)}, and yet it is no hang: {why}"
        actions.append(PageHuman(id=d.id(), cause=d.event, why=page, about=STALL))
    return actions


def _moved(former: Look, look: Look, found: Conclusion) -> bool:
    """Whether those who are named show something else than before; if they show nothing, anybody.

    A machine that does not answer holds up nobody who goes on.
    """
    calls, since = _calls(former), _calls(look)
    if any(since[group] > calls[group] for group in calls.keys() & since):
        return True
    before, after = _do(former), _do(look)
    both = before.keys() & after
    return any(before[rank] != after[rank] for rank in both.intersection(found.ranks) or both)


def _calls(look: Look) -> dict[tuple[str, Ranges], int]:
    """How many collectives were called and finished in each group, by flight records."""
    most: dict[tuple[str, Ranges], int] = {}
    for stood in look.stood:
        group, done = (stood.group, stood.members), (stood.enqueued or 0) + (stood.completed or 0)
        most[group] = max(most.get(group, 0), done)
    return most


def _do(look: Look) -> dict[Rank, tuple[Key, ...]]:
    """What each rank and its children do. The kernel's states flicker, and say less.

    Of ranks that cannot move nothing is found: one that was stopped between two looks shows other
    stacks, and does nothing all the same.
    """
    found: dict[Rank, tuple[Key, ...]] = {}
    for cluster in look.clusters:
        posture = cluster.posture
        processes = (posture.rank, *(child.shown for child in posture.children))
        if not any(shown.state and shown.state in HALTS for shown in processes):
            do = tuple(token_of(shown, look.stacks) for shown in processes)
            found.update(dict.fromkeys(ranks_in(cluster.ranks), do))
    return found


def it_went_on(d: Deciding, watching: Watching) -> list[ControllerAction]:
    """Something advanced: it is recorded, and nothing is stopped."""
    state = d.state
    mine = [look for look in watching.looks if look.purpose is Purpose.HANG]
    lasted_s = max(stalls.advanced_at(state), watching.noticed_at) - watching.since
    why = f"it went on by itself after {lasted_s:.1f} s"
    if state.finished_by_one > watching.step:
        why += f": step {state.finished_by_one} is finished"
    why += "; nothing was stopped for it"
    return [_judged(d, mine[-1], LookResult.WENT_ON, why), *_closed(d, watching, why)]


def _closed(d: Deciding, watching: Watching, why: str) -> list[ControllerAction]:
    """The incident ends with it, if it is about nothing else."""
    incident = d.state.incident
    if incident is None or incident.incident != watching.incident or incident.starts:
        return []
    return [CloseIncident(id=d.id(), cause=d.event, why=why, incident=incident.incident)]


# --- slow training, and people -------------------------------------------------------------------


def _of_slowness(d: Deciding, watching: Watching, look: Look) -> list[ControllerAction]:
    found = slowness.conclude(d, watching, look, taken_of(d.state, look))
    if found.result is LookResult.AGAIN:
        round_over = _judged(d, look, found.result, found.why)
        return [replace(round_over, group=BETWEEN.join(found.flags))]
    verdict = JudgeStacks(
        id=d.id(),
        cause=d.event,
        why=found.why,
        look=look.number,
        result=found.result,
        machines=found.machines,
        ranks=found.ranks,
        group=found.group,
    )
    if found.result is LookResult.MACHINES:
        return [verdict]
    actions = [verdict, *_closed(d, watching, found.why)]
    if found.result is LookResult.NOTHING:
        actions.append(PageHuman(id=d.id(), cause=d.event, why=found.why, about=SLOW))
    return actions


def _shown(d: Deciding, look: Look) -> JudgeStacks:
    """For people: what would be concluded, if it stood still."""
    if not look.clusters:
        return _judged(d, look, LookResult.SHOWN, "no machine has answered")
    found = conclude(taken_of(d.state, look))
    return _judged(d, look, LookResult.SHOWN, found.why, found)


def _judged(
    d: Deciding,
    look: Look,
    result: LookResult,
    why: str,
    found: Conclusion | None = None,
) -> JudgeStacks:
    machines = _named(d.state, found.machines) if found is not None else ()
    return JudgeStacks(
        id=d.id(),
        cause=d.event,
        why=why,
        look=look.number,
        result=result,
        machines=machines,
        ranks=found.ranks if found is not None else (),
        group=found.group if found is not None else "",
    )


def _named(state: State, positions: Iterable[NodeRank]) -> tuple[MachineId, ...]:
    return tuple(state.positions[n] for n in positions if n in state.positions)


# --- when ----------------------------------------------------------------------------------------


def next_at(state: State, watching: Watching, look: Look, now: Seconds) -> Seconds:
    """When to look again, after a look that is just judged."""
    policy = state.job.policy
    if watching.purpose is Purpose.SLOW:
        return look.asked_at + policy.slow_every_s
    if look.result is LookResult.WORKS:
        works = sum(1 for _ in takewhile(_has_worked, reversed(watching.looks)))
        return now + min(policy.look_retry_s * 2.0**works, policy.stall_max_s)
    former = _former(watching, look)
    first = bool(look.ranks or look.machines) and not (
        former is not None and (former.ranks or former.machines)
    )
    # Within one step, ranks that work may well show the same twice.
    again_s = max(policy.look_again_s, min(stalls.longer_step_s(state), policy.stall_min_s))
    return now + (again_s if first else policy.look_retry_s)


def _has_worked(look: Look) -> bool:
    return look.result is LookResult.WORKS
