"""The smallest parallel group that machines share: who goes as a whole when nobody can be named.

Pure arithmetic on core/groups.py, for aggregate.py and slowness.py. A group is taken with all its
machines (over-eviction), so one contains a machine if it has a rank there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from everstep.core.groups import Factors, Layout, called, size_of
from everstep.core.roles import role
from everstep.looks import Ranges, in_words, ranges_of, ranks_in
from everstep.model import GroupShape, NodeRank, Rank, Value

MOST = 0.8
"""A group that has this share of the machines in question will do if none has all of them."""
_ORDER = ("tp", "pp", "ep", "dp", "cp")
"""Which comes first of groups of one size."""
_TRIED = 16
"""Machines whose groups are tried: one that contains four of five has one of these."""
_MACHINE = "machine with"


class ParallelGroup(Value, frozen=True, kw_only=True):
    """A group, with its machines."""

    label: str
    """For people and as a key: "pp 24-31"."""
    machines: frozenset[NodeRank]
    size: int
    """Ranks of one group of this kind."""


def smallest(layout: Layout, machines: Sequence[NodeRank]) -> ParallelGroup | None:
    """That contains all of the machines, or else most of them; never the whole job."""
    wanted = frozenset(machines)
    tried = sorted(wanted)[:: -(-len(wanted) // _TRIED)] if wanted else []
    best: tuple[bool, int, int, int] | None = None
    found: tuple[GroupShape, frozenset[NodeRank]] | None = None
    for at, shape in enumerate(sorted(_kinds(layout), key=_order)):
        for first in {first for m in tried for first in _firsts(layout, shape.factors, m)}:
            covered = layout.machines_of(members(shape.factors, first))
            share = len(covered & wanted) / len(wanted)
            if share < MOST or len(covered) == layout.machines:
                continue
            key = (share < 1, len(covered), size_of(shape.factors), at)
            if best is None or key < best:
                best, found = key, (shape, covered)
    return _labelled(layout, *found) if found is not None else None


def fullest(layout: Layout, ranks: Ranges) -> tuple[str, ...]:
    """The groups of which the largest share are these ranks; of equal shares the one with most of
    them, and all of those if there are several. Where no group is smaller than the job, machines.
    """
    kinds = _kinds(layout) or (_machines(layout),)
    found: list[tuple[tuple[float, int], GroupShape, Rank]] = []
    for shape in kinds:
        counts = Counter(base(shape.factors, rank) for rank in ranks_in(ranks))
        size = size_of(shape.factors)
        found += [((n / size, n), shape, first) for first, n in counts.items()]
    most = max((full for full, _, _ in found), default=None)
    groups = {
        _labelled(layout, shape, layout.machines_of(members(shape.factors, first))).label
        for full, shape, first in found
        if full == most
    }
    return tuple(sorted(groups))


def count(layout: Layout, label: str) -> int:
    """How many groups there are of the kind of this one; those with the same machines are one."""
    kind, _ = _parts(label)
    for shape in (*layout.shapes, _machines(layout)):
        if called(shape.name, size_of(shape.factors)) == kind:
            firsts = set(_firsts(layout, shape.factors, NodeRank(0)))
            sets = {layout.machines_of(members(shape.factors, first)) for first in firsts}
            groups = layout.world_size // size_of(shape.factors)
            return max(1, groups * len(sets) // len(firsts))
    return 1


def of_one_kind(one: str, other: str) -> bool:
    """Whether two labels are of groups of the same kind."""
    return _parts(one)[0] == _parts(other)[0]


def _machines(layout: Layout) -> GroupShape:
    """Machines, as if they were groups."""
    return GroupShape(name=_MACHINE, factors=((1, layout.ranks_per_machine),))


def divides(layout: Layout) -> bool:
    """Whether some group does not have ranks on every machine."""
    firsts = ((shape.factors, Rank(0)) for shape in _kinds(layout))
    return any(len(layout.machines_of(members(*at))) < layout.machines for at in firsts)


def machines_named(layout: Layout, label: str) -> frozenset[NodeRank]:
    """The machines of a group that `smallest` or `fullest` called so; none if it is none of it."""
    kind, ranks = _parts(label)
    first = ranks.split("-")[0]
    if not first.isdigit():
        return frozenset()
    for shape in (*layout.shapes, _machines(layout)):
        if called(shape.name, size_of(shape.factors)) == kind:
            start = base(shape.factors, Rank(int(first)))
            return layout.machines_of(members(shape.factors, start))
    return frozenset()


def _parts(label: str) -> tuple[str, str]:
    """The kind, and the first of its ranks."""
    kind, _, ranks = label.partition(",")[0].rpartition(" ")
    return kind, ranks


def filled(layout: Layout | None, ranks: Ranges) -> bool:
    """Whether these are whole groups of one kind, no rank more or less, and not all of them."""
    if layout is None:
        return False
    for shape in _kinds(layout):
        size = size_of(shape.factors)
        counts = Counter(base(shape.factors, rank) for rank in ranks_in(ranks))
        if counts and len(counts) * size < layout.world_size and set(counts.values()) == {size}:
            return True
    return False


def even(layout: Layout, ranks: Ranges, kind: str) -> bool:
    """Whether each of several groups of a kind has equally many of these ranks, and none all."""
    for shape in layout.shapes:
        size = size_of(shape.factors)
        if role(shape.name) != kind or size == layout.world_size:
            continue
        counts = Counter(base(shape.factors, rank) for rank in ranks_in(ranks))
        most, least = max(counts.values(), default=size), min(counts.values(), default=0)
        if len(counts) * size == layout.world_size and least == most < size:
            return True
    return False


def base(factors: Factors, rank: Rank) -> Rank:
    """The lowest rank of the group of this shape that a rank is in."""
    within = sum((rank // stride) % size * stride for stride, size in factors)
    return Rank(rank - within)


def members(factors: Factors, first: Rank) -> tuple[Rank, ...]:
    """All ranks of the group whose lowest rank this is."""
    found = [int(first)]
    for stride, size in factors:
        found = [rank + stride * at for at in range(size) for rank in found]
    return tuple(map(Rank, sorted(found)))


def _kinds(layout: Layout) -> tuple[GroupShape, ...]:
    return tuple(s for s in layout.shapes if 1 < size_of(s.factors) < layout.world_size)


def _order(shape: GroupShape) -> int:
    kind = role(shape.name)
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)


def _firsts(layout: Layout, factors: Factors, machine: NodeRank) -> Iterator[Rank]:
    """The groups of a shape that have ranks on a machine."""
    per = layout.ranks_per_machine
    for rank in range(machine * per, (machine + 1) * per):
        yield base(factors, Rank(rank))


def _labelled(layout: Layout, shape: GroupShape, machines: frozenset[NodeRank]) -> ParallelGroup:
    """With the ranks of all groups of the kind that have exactly these machines."""
    firsts = set(_firsts(layout, shape.factors, min(machines)))
    groups = [members(shape.factors, first) for first in firsts]
    same = (rank for g in groups if layout.machines_of(g) == machines for rank in g)
    return ParallelGroup(label=_label(shape, same), machines=machines, size=size_of(shape.factors))


def _label(shape: GroupShape, ranks: Iterable[Rank]) -> str:
    return f"{called(shape.name, size_of(shape.factors))} {in_words(ranges_of(ranks))}"
