"""Parts of shards, as checkpoint/slices.py makes and joins them, without bytes: for agent.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from everstep.actions import BackUpStep, StartRanks
from everstep.core.must import must
from everstep.model import Copy, Peer, Rank, Replicated, ranks_in, spans_of

if TYPE_CHECKING:
    from everstep.sim.ground import Ground
    from everstep.sim.machine import Machine


def part_of(machine: Machine, order: BackUpStep, rank: Rank) -> Copy:
    """What is sent of the rank's shard."""
    stride, world_size = machine.ground.options.replica_stride, machine.job.world_size
    alike = range(rank % stride, world_size, stride) if stride and not order.whole else range(0)
    replicas = spans_of(map(Rank, alike)) if len(alike) > 1 else ()
    return Copy(rank=rank, step=order.step, generation=order.generation, replicas=replicas)


def replicated(machine: Machine, order: BackUpStep) -> tuple[Replicated, ...]:
    """What the owners of these parts say of them."""
    options = machine.ground.options
    parts = [part_of(machine, order, peer.rank) for peer in order.peers]
    return tuple(
        Replicated(
            rank=part.rank,
            replicas=part.replicas,
            digest=f"{order.step} of {part.rank if options.replicas_differ else 'all'}",
        )
        for part in parts
        if part.replicas
    )


def cannot_fetch(ground: Ground, order: StartRanks, peer: Peer, wanted: Copy) -> str:
    """Why this shard cannot be had from the memory of others; empty if it can."""
    source = ground.machines[peer.machine]
    backup = wanted if source.ran(wanted) else source.kept.find(wanted)
    if not source.serves(order.generation) or backup is None:
        return f"{peer.machine} did not give rank {peer.rank}'s shard"
    return _cannot_join(ground, order, backup)


def _cannot_join(ground: Ground, order: StartRanks, part: Copy) -> str:
    """Why the slices that a part lacks are not to be had; empty if they are, or if it is whole.

    Raises InvariantBroken where the real thing would find that what it joined is no rank's shard.
    """
    machines = {peer.rank: ground.machines[peer.machine] for peer in order.slices}
    for rank in ranks_in(part.replicas):
        source, wanted = machines.get(rank), replace(part, rank=rank, replicas=())
        if source is None or not source.serves(order.generation) or not source.holds(wanted):
            return f"nobody gave the slices of rank {rank}"
    must(
        not part.replicas or not ground.options.replicas_differ,
        f"rank {part.rank} was joined from slices of ranks that do not hold the same",
    )
    return ""
