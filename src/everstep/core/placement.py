"""Where the backup of each shard lies: never on a machine that can be evicted with its owner.

Over-eviction takes all machines of one parallel group at once (ByteRobust, 5.1), and with them
every rank on them, also those of other groups. So the rule is about machines: no group may cover
both the machine of an owner and the machine of its backup. In coordinates: keep tp, move dp and pp
by half their size (ByteRobust, 6.3 and Figure 9: TP=2, PP=4, DP=2 pairs ranks 8, 9 with 2, 3). A
placement is one shift of coordinates for all ranks, so every rank receives exactly one backup.

Dimensions without a name are moved like any other; what a name is good for is the preference above.

Some layouts cannot have it: a group that covers every machine leaves nothing outside it, and with
one dimension every group does. Then the next machine takes the backup (the loss of any one machine
is survived), and the placement says which groups are not covered.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from everstep.core.groups import Layout, called, groups_of, size_of
from everstep.core.roles import role
from everstep.model import NodeRank, Rank, Value


class Placement(Value, frozen=True, kw_only=True):
    """Backup peers of all ranks, and what they do not protect against."""

    peers: tuple[Rank, ...]
    """Index: owner's rank; value: the rank whose machine keeps its backup."""
    why: str
    uncovered: tuple[str, ...] = ()
    """Kinds of groups of which some one covers both an owner's machine and its backup's."""
    machine_covered: bool = True
    """Whether the loss of any one machine leaves a copy of every shard."""


def place(layout: Layout, racks: Sequence[str] | None = None) -> Placement:
    """Choose backup peers; `racks` names the rack (or switch) of each machine, where known."""
    best: Placement | None = None
    for peers, why in _candidates(layout, racks):
        placement = _judge(layout, peers, why)
        if not placement.uncovered and placement.machine_covered:
            return placement
        if best is None or _badness(placement) < _badness(best):
            best = placement
    assert best is not None, "the next machine is always a candidate"
    return best


def _badness(placement: Placement) -> tuple[bool, int]:
    return not placement.machine_covered, len(placement.uncovered)


def _candidates(
    layout: Layout, racks: Sequence[str] | None
) -> Iterator[tuple[tuple[Rank, ...], str]]:
    """Placements from the best to the last resort."""
    halves = [max(1, size // 2) if size > 1 else 0 for size in layout.sizes()]
    names = [role(dimension.name) for dimension in layout.dimensions]
    moving = [at for at, half in enumerate(halves) if half and names[at] != "tp"]
    # pp first: expert groups and data-parallel groups lie within one pipeline stage.
    pairs = sorted(
        itertools.combinations(moving, 2),
        key=lambda pair: ("pp" not in {names[at] for at in pair}, pair),
    )
    more = [c for count in range(3, len(moving) + 1) for c in itertools.combinations(moving, count)]
    chosen = [*pairs, *more, *((at,) for at in moving if not _grouped(layout, at))]
    tensor = [at for at, half in enumerate(halves) if half and names[at] == "tp"]
    chosen += [(at, other) for at in tensor for other in moving]
    for dimensions in chosen:
        shift = tuple(half if at in dimensions else 0 for at, half in enumerate(halves))
        along = " and ".join(layout.dimensions[at].called for at in sorted(dimensions))
        yield _shifted(layout, shift), f"backups move along {along} by half their size"
    yield _next_machine(layout, racks)


def _grouped(layout: Layout, at: int) -> bool:
    """Whether any group reaches along this dimension: then moving along it alone is no use."""
    stride = math.prod(layout.sizes()[:at])
    factors = [factor for shape in layout.shapes for factor in shape.factors]
    return any(first <= stride < first * size for first, size in factors)


def _shifted(layout: Layout, shift: tuple[int, ...]) -> tuple[Rank, ...]:
    sizes = layout.sizes()

    def peer(rank: Rank) -> Rank:
        coordinates = layout.coordinates(rank)
        moved = tuple((c + s) % n for c, s, n in zip(coordinates, shift, sizes, strict=True))
        return layout.rank(moved)

    return tuple(peer(Rank(rank)) for rank in range(layout.world_size))


def _next_machine(layout: Layout, racks: Sequence[str] | None) -> tuple[tuple[Rank, ...], str]:
    """The same local rank of another machine: of the next rack where racks are known."""
    offset, why = 1, "backups lie on the next machine"
    if racks is not None:
        crossing = _offset_across_racks(racks)
        if crossing is not None:
            offset, why = crossing, f"backups lie {crossing} machines on, in another rack"
    return (
        tuple(
            Rank((rank + offset * layout.ranks_per_machine) % layout.world_size)
            for rank in range(layout.world_size)
        ),
        why,
    )


def _offset_across_racks(racks: Sequence[str]) -> int | None:
    """Smallest offset that takes every machine to another rack; None if there is none."""
    count = len(racks)
    for offset in range(1, count):
        if all(racks[at] != racks[(at + offset) % count] for at in range(count)):
            return offset
    return None


def _judge(layout: Layout, peers: tuple[Rank, ...], why: str) -> Placement:
    """Check the rule for every group against the machines it covers."""
    backups: dict[NodeRank, set[NodeRank]] = {}
    for owner, peer in enumerate(peers):
        backups.setdefault(layout.machine(Rank(owner)), set()).add(layout.machine(peer))
    machine_covered = all(machine not in kept for machine, kept in backups.items())
    uncovered: dict[str, None] = {}
    for shape in layout.shapes:
        for group in groups_of(shape.factors, layout.world_size):
            covered = layout.machines_of(group)
            if any(backups[machine] & covered for machine in covered):
                uncovered[called(shape.name, size_of(shape.factors))] = None
                break
    return Placement(
        peers=peers,
        why=why,
        uncovered=tuple(uncovered),
        machine_covered=machine_covered,
    )
