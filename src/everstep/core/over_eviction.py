"""Who goes for what a look showed: a whole parallel group, its outliers, or nobody.

Asked by evicting.py once all ranks have stopped, and by slowness.py before it has them stopped. Its
limit is its own: one group, and no more machines than standbys are ready. "Isolate fast, do not
pinpoint": a few healthy machines that are swept along are tested at once and come back.
"""

from __future__ import annotations

from collections.abc import Sequence

from everstep.core.accusers import NO_STANDBY, Group, most_accused, named, ready_standbys
from everstep.core.alerts import Accusation
from everstep.core.state import State
from everstep.looks import LookResult
from everstep.model import MachineId, Seconds


def swept(state: State, others: Sequence[Group], now: Seconds) -> Group | None:
    """The machines that go for the look for which the ranks were stopped. `others` go anyway."""
    look = state.judged
    if look is None or look.result is not LookResult.MACHINES or _is_done(state):
        return None
    going = {name for group in others if not group.against for name in group.machines}
    machines = [name for name in look.machines if _is_member(state, name) and name not in going]
    if not machines:
        return None
    outliers = [name for name in look.outliers if name in machines]
    against, why = objection(state, machines, look.group, now, others), look.verdict
    if against and look.group and outliers and len(outliers) < len(machines):
        narrower = objection(state, outliers, look.group, now, others)
        if not narrower:
            why = f"{why}; of {look.group} only {named(outliers)}: {against}"
            machines, against = outliers, ""
    first = Accusation(machine=machines[0], at=look.judged_at, event=look.event, why=why)
    return Group(
        machines=tuple(machines),
        accusation=first,
        unit=look.group if len(machines) > 1 else "",
        why=why,
        against=against,
    )


def _is_done(state: State) -> bool:
    """Whether this recovery has gone on: some of them went, or a rung is taken."""
    look, incident = state.judged, state.incident
    if look is None or incident is None:
        return True
    taken = bool(incident.starts) and incident.starts[-1].generation == state.generation
    return taken or went_for(state)


def went_for(state: State) -> bool:
    """Whether machines went for the look for which the ranks were stopped."""
    look = state.judged
    return look is not None and any(
        each.member and each.at >= look.judged_at and each.machine in look.machines
        for each in state.evictions
    )


def _is_member(state: State, name: MachineId) -> bool:
    return state.machines[name].node_rank is not None


def objection(
    state: State,
    machines: Sequence[MachineId],
    group: str,
    now: Seconds,
    others: Sequence[Group] = (),
) -> str:
    """What speaks against it that all these machines go together; empty: nothing does.

    With a group they go as one, whatever its size. Without one each is accused by itself, and many
    at once are not the machines.
    """
    policy, nnodes, count = state.job.policy, state.job.nnodes, len(machines)
    going = {name for each in others if not each.against for name in each.machines}
    ready = [m for m in ready_standbys(state, now) if m.machine not in going]
    wanted = nnodes - len(state.positions) + sum(_is_member(state, name) for name in going)
    free = max(0, len(ready) - wanted)
    accused_most = most_accused(state.job)
    since = now - policy.accusers_within_s
    gone = {each.unit or each.machine for each in state.expelled if each.at > since}
    gone |= {each.unit or name for each in others if not each.against for name in each.machines}
    if count == nnodes > 1:
        return "they are the whole job, which is not the machines"
    if not group and (count > accused_most or (count > 1 and 2 * count > nnodes)):
        return f"{count} machines at once are not the machines: a switch, a storage, the code"
    if len(gone | ({group} if group else set(machines))) > accused_most:
        return f"{len(gone)} evictions within {policy.accusers_within_s / 60:g} minutes are enough"
    if count <= free:
        return ""
    return NO_STANDBY if not free else f"only {free} of {count} standbys are ready"
