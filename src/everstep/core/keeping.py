"""The rule that keeps steps in the memory of peers: which ones, and when.

A part of rules.py, which gives it its place in the order of importance. A step is kept for the
whole job or not at all, so the core chooses it, and early enough that every rank hears of it before
its slot is used again. One step at a time is on its way to peers or to disk: the two pins of a rank
are then the machine-safe step and that one.
"""

from __future__ import annotations

import math
from functools import lru_cache

from everstep.actions import BackUpStep, ControllerAction
from everstep.core.deciding import Deciding
from everstep.core.groups import Layout, layout_of
from everstep.core.layouts import known_layout
from everstep.core.placement import Placement, place
from everstep.core.state import State
from everstep.core.tiers import advancing, backs_up, steps_in
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

REPORTED_WITHIN_S: Seconds = 2.0
"""News of steps is no older than this while they advance: a second in the agent, one in intake.py.
When it is older, training stands still, and no step is taken to be finished without being told."""
SPREAD = 0.5
"""A backup is sent over this part of the time until the next one is due: training's own traffic
keeps most of the network at any moment, and the step is safe well before the next one."""


def back_up_step(d: Deciding) -> list[ControllerAction]:
    """Begin the next backup step once the former one is complete everywhere and on disk if due.

    At once and at full speed where the loss of a machine would cost more than usual: one of those
    that held the machine-safe step is gone, or after a restart there is no such step.
    """
    state = d.state
    if not backs_up(state) or state.backup is not None or state.persisting:
        return []
    if not advancing(state) or d.now < state.backup_not_before:
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
            whole=state.unequal,
        )
        for node_rank, machine in enumerate(state.members())
    ]


def _why(state: State, step: Step) -> str:
    where = placement_of(state).why
    if state.unequal:
        where += f"; shards are sent whole, since {state.unequal}"
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


def _next_to_be_told(state: State, now: Seconds) -> int:
    """The first step that every rank can be told of before it lets go of it.

    Ranks are further than the last report said, and each keeps what it saved for two more steps.
    """
    since_s = min(max(0.0, now - state.progress_at), REPORTED_WITHIN_S)
    by_now = state.finished_by_all + steps_in(state, since_s)
    return max(by_now, state.finished_by_one) + 1 + steps_in(state, state.backup_lead_s)


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
