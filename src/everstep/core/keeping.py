"""The rules that keep steps: which one goes to peers, which one to disk, and when.

A part of rules.py, which gives them their place in the order of importance. A step is kept for the
whole job or not at all, so the core chooses it, and early enough that every rank hears of it before
its slot is used again. One step at a time is on its way to peers or to disk: the two pins of a rank
are then the machine-safe step and that one.
"""

from __future__ import annotations

import math
from functools import lru_cache

from everstep.actions import BackUpStep, ControllerAction, PersistStep
from everstep.core.deciding import Deciding
from everstep.core.ending import publish
from everstep.core.groups import Layout, layout_of
from everstep.core.layouts import known_layout
from everstep.core.placement import Placement, place
from everstep.core.state import Phase, State
from everstep.model import (
    NO_STEP,
    LayoutSpec,
    MachineId,
    NodeRank,
    Peer,
    Rank,
    Seconds,
    Step,
)

DISK_LEAD_S: Seconds = 2.0
"""A step is kept for the disk only if it lies this far ahead of what is known to be finished: every
rank must hear of it before it saves it. Nothing is in a hurry there."""
BACKUP_LEAD_S: Seconds = 0.5
"""The same for backups, ahead of the steps that should be finished by now: the time until an order
is journalled and has come to every rank, with room to spare. It doubles with every backup that
fails, since one that came too late fails (and costs nothing but the attempt)."""
BACKUP_LEAD_MAX_S: Seconds = 4.0
REPORTED_WITHIN_S: Seconds = 2.0
"""News of steps is no older than this while they advance: a second in the agent, one in intake.py.
When it is older, training stands still, and no step is taken to be finished without being told."""
SPREAD = 0.5
"""A backup is sent over this part of the time until the next one is due: training's own traffic
keeps most of the network at any moment, and the step is safe well before the next one."""


# --- disk ----------------------------------------------------------------------------------------


def persist_step(d: Deciding) -> list[ControllerAction]:
    """Put a step on disk when one is due: the machine-safe one, which is kept anyway.

    Without backups, choose a step for the whole job that every rank can still hear of in time.
    """
    state = d.state
    every = state.job.checkpoint.disk_every
    if not every or state.persist is not None or not _advancing(state):
        return []
    newest = max(state.finished_by_one, state.finished_by_all)
    if backs_up(state) and not _pausing(d):
        if state.safe is None or state.safe.step < state.persist_after + every or state.single:
            return []
        step, generation = state.safe.step, state.safe.generation
        why = f"every {every} steps go to disk; step {step} is the newest machine-safe one"
    else:
        due = max(newest + 1 + _steps_in(state, DISK_LEAD_S), state.persist_after + 1)
        step, generation = Step(math.ceil(due / every) * every), state.generation
        why = f"every {every} steps go to disk; the newest finished step is {newest}"
    return [
        PersistStep(
            id=d.id(),
            cause=d.event,
            why=why,
            machine=machine.machine,
            generation=generation,
            step=step,
        )
        for machine in state.members()
    ]


def publish_step(d: Deciding) -> list[ControllerAction]:
    persist = d.state.persist
    if persist is None or persist.awaiting or persist.publishing or persist.failed:
        return []
    return [publish(d)]


def _pausing(d: Deciding) -> bool:
    """Whether a backup failed and is not due again: the time for disk copies of steps of their own.

    At any other time they would take turns for ever where steps are short, and one rank would have
    three steps to keep: the machine-safe one, the next one, and the one for the disk.
    """
    state = d.state
    return state.backups_failed > 0 and state.backup is None and d.now < state.backup_not_before


# --- peers ---------------------------------------------------------------------------------------


def back_up_step(d: Deciding) -> list[ControllerAction]:
    """Begin the next backup step once the former one is complete everywhere and on disk if due.

    At once and at full speed where the loss of a machine would cost more than usual: one of those
    that held the machine-safe step is gone, or after a restart there is no such step.
    """
    state = d.state
    if not backs_up(state) or state.backup is not None or state.persist is not None:
        return []
    if not _advancing(state) or d.now < state.backup_not_before:
        return []
    hurry = state.single or (state.safe is None and state.restored > NO_STEP)
    every = 1 if hurry else max(1, state.job.checkpoint.backup_every)
    due = max(_next_to_be_told(state, d.now), state.backup_after + 1)
    step = Step(math.ceil(due / every) * every)
    peers = backup_peers(state)
    return [
        BackUpStep(
            id=d.id(),
            cause=d.event,
            why=_why(state, step),
            machine=machine.machine,
            generation=state.generation,
            step=step,
            safe=state.safe.step if state.safe is not None else NO_STEP,
            peers=tuple(peers[rank] for rank in state.job.ranks_of(NodeRank(node_rank))),
            spread_s=0.0 if hurry else _spread_s(state),
        )
        for node_rank, machine in enumerate(state.members())
    ]


def _why(state: State, step: Step) -> str:
    where = placement_of(state).why
    if state.safe is None and state.restored > NO_STEP:
        return f"step {step} is backed up as soon as it can be, since none is machine-safe: {where}"
    if state.safe is not None and state.single:
        return (
            f"step {step} is backed up as soon as it can be, since some shards of step"
            f" {state.safe.step} lie in one memory only: {where}"
        )
    return f"step {step} is the next backup step: {where}"


def _spread_s(state: State) -> Seconds:
    interval_s = (state.step_s or 0.0) * max(1, state.job.checkpoint.backup_every)
    return round(SPREAD * interval_s, 3)


def _advancing(state: State) -> bool:
    """Whether all ranks are known to train, and how fast."""
    known = state.finished_by_all > NO_STEP and state.step_s is not None
    return known and state.phase is Phase.RUNNING and not state.failures and not state.exits


def _next_to_be_told(state: State, now: Seconds) -> int:
    """The first step that every rank can be told of before it lets go of it.

    Ranks are further than the last report said, and each keeps what it saved for two more steps.
    """
    since_s = min(max(0.0, now - state.progress_at), REPORTED_WITHIN_S)
    by_now = state.finished_by_all + _steps_in(state, since_s)
    lead_s = min(BACKUP_LEAD_S * 2**state.backups_failed, BACKUP_LEAD_MAX_S)
    return max(by_now, state.finished_by_one) + 1 + _steps_in(state, lead_s)


def _steps_in(state: State, time_s: Seconds) -> int:
    return math.ceil(time_s / max(state.step_s or 0.0, 1e-6))


def backs_up(state: State) -> bool:
    """Whether shards are also kept in the memory of a second machine."""
    return state.job.backs_up and all(machine.shard_port for machine in state.members())


def backup_peers(state: State) -> list[Peer]:
    """For every rank, the machine that keeps its backup."""
    per_machine = state.job.nproc_per_node
    return [
        peer_at(state, Rank(owner), state.positions[NodeRank(peer // per_machine)])
        for owner, peer in enumerate(placement_of(state).peers)
    ]


def peer_at(state: State, rank: Rank, name: MachineId) -> Peer:
    """Where a shard of this rank is sent to, or fetched from."""
    machine = state.machines[name]
    return Peer(rank=rank, machine=name, address=machine.shard_address, port=machine.shard_port)


def placement_of(state: State) -> Placement:
    """Of the job's layout; with none known, data parallelism alone is assumed."""
    layout = known_layout(state).layout
    if layout is None:
        layout = layout_of(LayoutSpec(dp=state.job.world_size), state.job.nproc_per_node)
    return _place(layout)


@lru_cache(maxsize=8)
def _place(layout: Layout) -> Placement:
    return place(layout)
