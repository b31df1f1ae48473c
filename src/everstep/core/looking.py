"""Looks at the stacks of all ranks: when to take one, whom to ask, what follows from it.

rules.py has `look` in its place; looked.py notes what was asked and what came. verdicts.py says
what follows from a look, with aggregate.py; stalls.py when nothing advances, slowness.py when
training became slower, over_eviction.py who goes for it.
"""

from __future__ import annotations

from collections.abc import Iterator

from everstep.actions import (
    CollectStacks,
    ControllerAction,
    Rung,
    SendStacks,
    TakeRung,
)
from everstep.core import slowness, stalls, verdicts
from everstep.core.deciding import Deciding
from everstep.core.look_state import Look, Watching
from everstep.core.looked import shown_in, under_way
from everstep.core.state import Machine, Phase, State
from everstep.looks import (
    NO_STACK,
    Fingerprint,
    Purpose,
    Ranges,
    size_of,
)
from everstep.model import AgentAt, MachineId, NodeRank, Seconds

TEXTS_MAX = 1000
"""Of more different stacks in one look, the text of those that fewest ranks show is not sent for.
"""
TEXTS_WITHIN_S: Seconds = 10.0
"""What has not come by then is done without."""
AGENTS_SHARE = 0.9
"""Of the time for a look, so much is for the agent; the rest is for its answer to arrive."""
NEIGHBOURS = 2


def look(d: Deciding) -> list[ControllerAction]:
    """The next thing to do with stacks."""
    state, watching = d.state, d.state.watching
    if not _runs(state):
        return []
    if (
        watching is not None
        and watching.purpose is Purpose.HANG
        and stalls.is_over(state, watching)
    ):
        return verdicts.it_went_on(d, watching)
    current = under_way(state)
    if watching is None or current is None:
        return _begin(d)
    return _send_for(d, current) or (
        verdicts.judge(d, watching, current) if _complete(state, current, d.now) else []
    )


def _runs(state: State) -> bool:
    """Whether there are ranks to look at, and nothing is known that ends them anyway."""
    runs = state.phase is Phase.RUNNING and state.finish is None
    return runs and state.full and not state.failures


def symptom(d: Deciding) -> str:
    """Why an incident begins although nothing failed: training stands still, or became slower."""
    if under_way(d.state) is not None or not _runs(d.state):
        return ""
    found = stalls.due(d.state, d.now)
    return found.why if found is not None else slowness.due(d)


def _begin(d: Deciding) -> list[ControllerAction]:
    """Take a look, if it is time for one."""
    state, watching = d.state, d.state.watching
    purpose, why = _purpose(d)
    asked = [machine for machine in state.members() if machine.connected] if why else []
    if not asked:
        return slowness.tell(d) if watching is None else []
    actions: list[ControllerAction] = []
    first = watching is None or watching.purpose is not purpose
    if first and purpose is not Purpose.ASKED and state.incident is not None:
        actions.append(_aggregate(d, purpose, why))
    cause = actions[0].id if actions else d.event
    return [*actions, *(_collect(d, machine, purpose, why, cause) for machine in asked)]


def _purpose(d: Deciding) -> tuple[Purpose, str]:
    """What to look for now, and why; empty: there is no need to."""
    state, watching = d.state, d.state.watching
    found = stalls.due(state, d.now)
    if found is not None:
        return Purpose.HANG, found.why
    if watching is not None and _looks_again(state, watching, d.now):
        number = 1 + sum(each.purpose is watching.purpose for each in watching.looks)
        return watching.purpose, f"{_MATTER[watching.purpose]}: look {number} at it"
    slow = slowness.due(d) if watching is None else ""
    if slow:
        return Purpose.SLOW, slow
    by = state.stacks_wanted_by
    return Purpose.ASKED, f"{by} wants to see the stacks" if by else ""


def _looks_again(state: State, watching: Watching, now: Seconds) -> bool:
    at = watching.next_at
    return at is not None and at <= now and not stalls.cut_off(state)


_MATTER = {
    Purpose.HANG: "nothing advances still",
    Purpose.SLOW: "training is slower still",
    Purpose.ASKED: "",
}


def _aggregate(d: Deciding, purpose: Purpose, why: str) -> TakeRung:
    incident = d.state.incident
    assert incident is not None
    return TakeRung(
        id=d.id(),
        cause=incident.opened_by,
        why=f"{purpose}: {why}; the stacks of all ranks are compared while they run",
        incident=incident.incident,
        rung=Rung.AGGREGATE,
        failure=str(purpose),
    )


def _collect(
    d: Deciding, machine: Machine, purpose: Purpose, why: str, cause: str
) -> ControllerAction:
    policy = d.state.job.policy
    return CollectStacks(
        id=d.id(),
        cause=cause,
        why=why,
        machine=machine.machine,
        generation=d.state.generation,
        look=d.state.looked + 1,
        within_s=AGENTS_SHARE * policy.look_within_s,
        purpose=purpose,
        neighbours=_neighbours(d.state, machine),
        native=_below_python(d, purpose),
    )


def _below_python(d: Deciding, purpose: Purpose) -> bool:
    """Whether ranks may be paused for a moment to see more: not while they advance."""
    if purpose is Purpose.ASKED:
        return not stalls.advances(d.state, d.now)
    return purpose is Purpose.HANG


def _neighbours(state: State, machine: Machine) -> tuple[AgentAt, ...]:
    """The next members by position, as far as it is known where they are reached."""
    nnodes = state.job.nnodes
    at = machine.node_rank or 0
    names = [state.positions[NodeRank((at + n) % nnodes)] for n in range(1, NEIGHBOURS + 1)]
    others = [state.machines[name] for name in dict.fromkeys(names) if name != machine.machine]
    return tuple(
        AgentAt(
            machine=other.machine,
            address=other.shard_address or other.address,
            port=other.shard_port,
        )
        for other in others
        if other.shard_port
    )


def _send_for(d: Deciding, current: Look) -> list[ControllerAction]:
    """One machine for each stack whose text is not known."""
    texts: dict[MachineId, list[Fingerprint]] = {}
    for fingerprint, machine in _unknown(d.state, current):
        texts.setdefault(machine, []).append(fingerprint)
    return [
        SendStacks(
            id=d.id(),
            cause=d.event,
            why=f"look {current.number}: the text of {_stacks(len(wanted))} is not known yet",
            machine=machine,
            look=current.number,
            stacks=tuple(wanted),
        )
        for machine, wanted in texts.items()
    ]


def _stacks(count: int) -> str:
    return f"{count} stack{'s' * (count > 1)}"


def _unknown(state: State, current: Look) -> Iterator[tuple[Fingerprint, MachineId]]:
    """Stacks that nobody was asked for, and who shows them; those of most ranks first."""
    known = {*current.stacks, *current.fetching, *current.untold, NO_STACK}
    left = TEXTS_MAX - len(known)
    shown = shown_in(current) if left > 0 else {}
    wanted = [item for item in shown.items() if item[0] not in known]
    for fingerprint, ranks in sorted(wanted, key=lambda item: -size_of(item[1])):
        if left <= 0:
            return
        machine = _who(state, current, ranks)
        if machine is not None:
            left -= 1
            yield fingerprint, machine


def _who(state: State, current: Look, ranks: Ranges) -> MachineId | None:
    """The first machine with these ranks that is heard of, and has answered."""
    for first, _ in ranks:
        name = state.positions.get(NodeRank(first // state.job.nproc_per_node))
        unheard = name in current.awaiting or name in current.silent
        if name is not None and not unheard and state.machines[name].connected:
            return name
    return None


def _complete(state: State, current: Look, now: Seconds) -> bool:
    """Whether all have answered, or had the time to. Not when this controller hears of few."""
    if stalls.cut_off(state) or now < _returned_by(state, current):
        return False
    if current.awaiting and now < _answered_by(state, current):
        return False
    return not current.fetching or now >= current.fetched_at + TEXTS_WITHIN_S


def _answered_by(state: State, current: Look) -> Seconds:
    return current.asked_at + state.job.policy.look_within_s


def _returned_by(state: State, current: Look) -> Seconds:
    """Until when an agent may come back that had no connection when the look began."""
    gone = [state.machines[name] for name in current.silent if name in state.machines]
    since = (machine.silent_since for machine in gone if not machine.connected)
    return max(since, default=float("-inf")) + state.job.policy.agent_return_s


def deadlines(state: State) -> Iterator[Seconds]:
    """When there may be something to look at, or to give up."""
    if not _runs(state):
        return
    current, watching = under_way(state), state.watching
    if current is not None:
        yield _returned_by(state, current)
        if current.awaiting:
            yield _answered_by(state, current)
        if current.fetching:
            yield current.fetched_at + TEXTS_WITHIN_S
        return
    if watching is not None and watching.next_at is not None:
        yield watching.next_at
    if watching is None or watching.purpose is not Purpose.HANG:
        found = stalls.stall(state)
        if found is not None:
            yield found.at
    if watching is None:
        yield from slowness.deadlines(state)
