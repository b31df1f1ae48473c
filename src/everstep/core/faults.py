"""What a requested fault hits when its target is left open, and whether it can be done at all.

Called by core/rules.py to decide, and by the controller's server to refuse a request that names
what does not exist, before it becomes an event.
"""

from __future__ import annotations

from everstep.core.state import Phase, State
from everstep.events import FaultRequested
from everstep.model import Fault, MachineId, NodeRank, Rank, Value


class Target(Value, frozen=True, kw_only=True):
    """Whom the fault hits; machine None is the controller."""

    machine: MachineId | None = None
    rank: Rank | None = None


def target_of(state: State, request: FaultRequested) -> Target:
    """The named target, else the last rank or the machine at the last position."""
    if request.fault is Fault.KILL_CONTROLLER:
        return Target()
    last = NodeRank(state.job.nnodes - 1)
    if request.fault is Fault.KILL_RANK:
        rank = request.rank if request.rank is not None else Rank(state.job.world_size - 1)
        position = NodeRank(rank // state.job.nproc_per_node)
        return Target(machine=state.positions.get(position), rank=rank)
    return Target(machine=request.machine or state.positions.get(last))


def objection(state: State, request: FaultRequested) -> str | None:
    """One sentence that says why the request cannot be carried out; None if it can."""
    if state.phase is not Phase.RUNNING:
        return f"the job is {state.phase}, not running: wait until `everstep status` says running"
    if request.rank is not None and not 0 <= request.rank < state.job.world_size:
        return f"rank {request.rank} does not exist: ranks go from 0 to {state.job.world_size - 1}"
    target = target_of(state, request)
    if request.fault is Fault.KILL_CONTROLLER:
        return None
    machine = state.machines.get(target.machine) if target.machine else None
    if machine is None or machine.evicted or machine.released:
        known = ", ".join(m.machine for m in state.members())
        return f"machine {request.machine} is not in the job: its machines are {known}"
    if not machine.connected:
        return f"the agent of {machine.machine} is not connected: try again in a moment"
    return None
