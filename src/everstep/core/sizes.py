"""Other numbers of machines for one job: which fit, who sits where, whose shard each rank gets.

Pure arithmetic over the layout, for resize.py, regrown.py and the invariants. What differs between
two sizes is the number of data-parallel replicas alone. Ranks are alike if all their other
coordinates agree: where the state is replicated, each can go on with the other's shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from everstep.core.groups import layout_of
from everstep.model import JobSpec, LayoutSpec, MachineId, NodeRank, Rank, Value

Place = tuple[int, ...]
"""Coordinates of a rank within its replica."""


class Size(Value, frozen=True, kw_only=True):
    """Machines and replicas."""

    nnodes: int
    dp: int


def largest(spec: JobSpec, machines: int) -> Size | None:
    """The most replicas that so many machines can run; None: not enough of them."""
    assert spec.elastic is not None, "only an elastic job has sizes"
    for dp in range(spec.dp, max(1, spec.elastic.dp_min) - 1, -1):
        ranks, over = divmod(spec.world_size * dp, spec.dp)
        nnodes, rest = divmod(ranks, spec.nproc_per_node)
        if not over and not rest and 1 <= nnodes <= machines:
            return Size(nnodes=nnodes, dp=dp)
    return None


def places(job: JobSpec) -> tuple[Place, ...]:
    """Of all ranks."""
    return _places(job.layout or LayoutSpec(dp=job.world_size))


@lru_cache(maxsize=8)
def _places(spec: LayoutSpec) -> tuple[Place, ...]:
    layout = layout_of(spec)
    within = [at for at, each in enumerate(layout.dimensions) if each.name != "dp"]
    every = (layout.coordinates(Rank(rank)) for rank in range(layout.world_size))
    return tuple(tuple(coordinates[at] for at in within) for coordinates in every)


def replica(job: JobSpec, rank: Rank) -> int:
    """To which replica the rank belongs."""
    layout = layout_of(job.layout or LayoutSpec(dp=job.world_size))
    at = [each.name for each in layout.dimensions].index("dp")
    return layout.coordinates(rank)[at]


def alike(new: JobSpec, old: JobSpec) -> dict[Rank, tuple[Rank, ...]]:
    """For each rank of the new size those of the old one whose shard it can go on with."""
    found: dict[Place, list[Rank]] = {}
    for rank, place in enumerate(places(old)):
        found.setdefault(place, []).append(Rank(rank))
    return {Rank(rank): tuple(found[place]) for rank, place in enumerate(places(new))}


def seats(
    new: JobSpec, old: JobSpec, positions: Mapping[NodeRank, MachineId]
) -> dict[NodeRank, MachineId]:
    """Positions in the new size for machines that have some in the old one.

    Who has ranks in its memory that are alike those of a position takes it, in order; then the
    others take what is left.
    """
    known, wanted = places(old), places(new)
    left = {name: _of(old, known, at) for at, name in sorted(positions.items())}
    chosen: dict[NodeRank, MachineId] = {}
    for at in map(NodeRank, range(new.nnodes)):
        mine = _of(new, wanted, at)
        name = next((name for name, theirs in left.items() if theirs == mine), None)
        if name is not None:
            chosen[at] = name
            del left[name]
    free = [NodeRank(at) for at in range(new.nnodes) if at not in chosen]
    return dict(sorted((chosen | dict(zip(free, left, strict=False))).items()))


def _of(job: JobSpec, every: Sequence[Place], at: NodeRank) -> list[Place]:
    return [every[rank] for rank in job.ranks_of(at)]
