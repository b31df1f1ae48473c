"""Where the backup of each shard lies: never on a machine that can be evicted with its owner.

Over-eviction takes all machines of one parallel group at once (ByteRobust, 5.1), and with them
every rank on them, also those of other groups. So the rule is about machines: no group may cover
both the machine of an owner and the machine of its backup. In coordinates: keep tp, move dp and pp
by half their size (ByteRobust, 6.3 and Figure 9: TP=2, PP=4, DP=2 pairs ranks 8, 9 with 2, 3). A
placement is one shift of coordinates for all ranks, so every rank receives exactly one backup.

Some layouts cannot have it: a group that covers every machine leaves nothing outside it, and with
one dimension every group does. Then the next machine takes the backup (the loss of any one machine
is survived), and the placement says which groups are not covered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from everstep.core.groups import Layout
from everstep.model import NodeRank, Rank, Value


class Placement(Value, frozen=True, kw_only=True):
    """Backup peers of all ranks, and what they do not protect against."""

    peers: tuple[Rank, ...]
    """Index: owner's rank; value: the rank whose machine keeps its backup."""
    why: str
    uncovered: tuple[str, ...] = ()
    """Dimensions of which some group covers both an owner's machine and its backup's."""
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
    tp = layout.order.index("tp")
    moving = [at for at, half in enumerate(halves) if half and at != tp]
    pp = layout.order.index("pp")
    # pp first: expert groups and data-parallel groups lie within one pipeline stage.
    pairs = sorted(itertools.combinations(moving, 2), key=lambda pair: (pp not in pair, pair))
    chosen = [*pairs, *([tuple(moving)] if len(moving) > 2 else [])]
    if tp not in moving and halves[tp]:
        chosen += [(tp, at) for at in moving]
    for dimensions in chosen:
        shift = tuple(half if at in dimensions else 0 for at, half in enumerate(halves))
        names = " and ".join(layout.order[at] for at in sorted(dimensions))
        yield _shifted(layout, shift), f"backups move along {names} by half their size"
    yield _next_machine(layout, racks)


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
    for name, group in layout.groups():
        covered = layout.machines_of(group)
        if name not in uncovered and any(backups[machine] & covered for machine in covered):
            uncovered[name] = None
    return Placement(
        peers=peers,
        why=why,
        uncovered=tuple(uncovered),
        machine_covered=machine_covered,
    )
