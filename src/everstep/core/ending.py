"""The end of a job: stop the ranks, keep the newest step on disk, release every machine, go.

Rules in the sense of rules.py, asked only after FinishJob. Whatever does not answer in
`PolicySpec.end_within_s` is left behind: the end of a job must come.
"""

from __future__ import annotations

from everstep.actions import (
    BeginGeneration,
    ControllerAction,
    EndController,
    Outcome,
    PersistStep,
    ReleaseMachine,
    StopRanks,
)
from everstep.core.deciding import Deciding
from everstep.core.patience import ending_at, heard_until
from everstep.core.restore import choose_from
from everstep.core.state import Machine
from everstep.core.tiers import publish
from everstep.model import Generation


def end_of_job(d: Deciding) -> list[ControllerAction]:
    """The next stage of the end, once the former one is done or given up."""
    state = d.state
    if not state.ending_stopped:
        return _stop(d)
    if not _waited(d):
        return []
    if not state.ending_ready:
        return _last_copy(d) or _release(d)
    return [EndController(id=d.id(), cause=d.event, why="every machine is released or silent")]


def _waited(d: Deciding) -> bool:
    """Whether nobody who could still answer owes an answer."""
    state = d.state
    if d.now >= ending_at(state):
        return True
    persist = state.disk.persist
    owing = [*state.awaiting, *(persist.awaiting if persist else ())]
    publishing = persist is not None and bool(persist.publishing)
    return not publishing and not any(_heard(d, state.machines[name]) for name in owing)


def _heard(d: Deciding, machine: Machine) -> bool:
    return d.now < heard_until(d.state, machine)


def _stop(d: Deciding) -> list[ControllerAction]:
    state = d.state
    begin = BeginGeneration(
        id=d.id(),
        cause=d.event,
        generation=Generation(state.generation + 1),
        why="the job ends: no rank of any generation may go on",
    )
    stopped = state.finish is not None and state.finish.outcome is Outcome.STOPPED
    orders = [
        StopRanks(
            id=d.id(),
            cause=begin.id,
            why="the job ends",
            machine=machine.machine,
            generation=begin.generation,
            grace_s=state.job.policy.stop_grace_s if stopped else 0.0,
            within_s=state.job.policy.gone_within_s,
        )
        for machine in state.members()
        if _heard(d, machine)
    ]
    return [begin, *orders]


def _last_copy(d: Deciding) -> list[ControllerAction]:
    """Publish the newest step, so that nothing committed is lost with the shared memory."""
    state = d.state
    if d.now >= ending_at(state) or state.job.checkpoint.disk_every.never or not state.full:
        return []
    persist = state.disk.persist
    if persist is None:
        return _persist(d)
    if persist.failed or persist.publishing or persist.awaiting:
        return []
    return [publish(d)]


def _persist(d: Deciding) -> list[ControllerAction]:
    state = d.state
    choice = choose_from(state)
    if choice.copy in state.published or choice.local < state.job.world_size:
        return []
    if choice.copy.step <= state.disk.begun:
        return []
    return [
        PersistStep(
            id=d.id(),
            cause=d.event,
            why=f"the job ends and step {choice.copy.step} is only in memory",
            machine=machine.machine,
            generation=choice.copy.generation,
            step=choice.copy.step,
        )
        for machine in state.members()
    ]


def _release(d: Deciding) -> list[ControllerAction]:
    state = d.state
    to_go = [m for m in state.machines.values() if _heard(d, m)]
    if not to_go:
        return [EndController(id=d.id(), cause=d.event, why="no machine is left to release")]
    return [
        ReleaseMachine(id=d.id(), cause=d.event, why="the job is over", machine=machine.machine)
        for machine in to_go
    ]
