"""Layout arithmetic: ranks, parallel groups, and the machines that a group covers.

Pure; used by placement.py and, later, by whatever evicts groups. Ranks form a grid: a dimension is
what varies while the others stand still, and a rank's number is made of its coordinates, the
fastest dimension first. A group is a shape laid somewhere on the grid. Where the layout is stated
(`--layout`), dimensions are tp, cp, dp and pp, as in torch.distributed and Megatron-LM, and expert
parallelism (ep) divides the ranks of one tp and pp coordinate, taken in rank order over dp and cp,
into blocks of `ep` ranks. Where it is seen (core/seen.py), names and number are what they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from everstep.model import GroupShape, LayoutSpec, NodeRank, Rank, UserError, Value

DIMENSIONS = LayoutSpec().order
Factors = tuple[tuple[int, int], ...]
"""As GroupShape.factors."""


class LayoutInvalid(UserError):
    """The sizes do not describe the ranks of the job."""


class Dimension(Value, frozen=True, kw_only=True):
    """One direction of the grid."""

    name: str
    """Empty if nobody said it."""
    size: int

    @property
    def called(self) -> str:
        """For people."""
        return called(self.name, self.size)


class Layout(Value, frozen=True, kw_only=True):
    """The grid of a job's ranks, the shapes of its groups, and how many ranks one machine has."""

    dimensions: tuple[Dimension, ...]
    """From the one that varies fastest with the rank to the slowest; the product of their sizes is
    the number of ranks."""
    shapes: tuple[GroupShape, ...]
    """Of groups of more than one rank."""
    ranks_per_machine: int = 1

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes())

    @property
    def machines(self) -> int:
        return self.world_size // self.ranks_per_machine

    def sizes(self) -> tuple[int, ...]:
        return tuple(dimension.size for dimension in self.dimensions)

    def coordinates(self, rank: Rank) -> tuple[int, ...]:
        found = []
        rest: int = rank
        for size in self.sizes():
            rest, coordinate = divmod(rest, size)
            found.append(coordinate)
        return tuple(found)

    def rank(self, coordinates: tuple[int, ...]) -> Rank:
        found = 0
        for size, coordinate in zip(reversed(self.sizes()), reversed(coordinates), strict=True):
            found = found * size + coordinate
        return Rank(found)

    def machine(self, rank: Rank) -> NodeRank:
        return NodeRank(rank // self.ranks_per_machine)

    def groups(self) -> Iterator[tuple[str, tuple[Rank, ...]]]:
        """Every group of more than one rank, with the name of its shape."""
        for shape in self.shapes:
            for group in groups_of(shape.factors, self.world_size):
                yield shape.name, group

    def machines_of(self, group: tuple[Rank, ...]) -> frozenset[NodeRank]:
        """What is evicted when the group is."""
        return frozenset(self.machine(rank) for rank in group)

    def in_words(self) -> str:
        """As --layout would say it: "tp=2, dp=4"."""
        named = [(d.name, d.size) for d in self.dimensions if d.size > 1]
        inside = {name for name, _ in named}
        named += [(s.name, size_of(s.factors)) for s in self.shapes if s.name not in inside]
        return ", ".join(f"{name or 'unnamed'}={size}" for name, size in named) or "one rank"


def called(name: str, size: int) -> str:
    """A kind of groups, for people."""
    return name or f"unnamed groups of {size}"


def groups_of(factors: Factors, world_size: int) -> Iterator[tuple[Rank, ...]]:
    """All groups of this shape, by their lowest rank."""
    inside = [
        sum(stride * at for (stride, _), at in zip(factors, place, strict=True))
        for place in itertools.product(*(range(size) for _, size in factors))
    ]
    inside.sort()
    for first in range(world_size):
        if all((first // stride) % size == 0 for stride, size in factors):
            yield tuple(Rank(first + offset) for offset in inside)


def size_of(factors: Factors) -> int:
    """Ranks of one group."""
    return math.prod(size for _, size in factors)


def layout_of(spec: LayoutSpec, ranks_per_machine: int = 1) -> Layout:
    """The layout that somebody stated. Raises LayoutInvalid if its sizes are none."""
    sizes = {name: getattr(spec, name) for name in (*DIMENSIONS, "ep")}
    wrong = [f"{name}={size}" for name, size in sizes.items() if size < 1]
    if wrong:
        raise LayoutInvalid(f"Sizes of a layout must be at least 1, not {', '.join(wrong)}.")
    if sorted(spec.order) != sorted(DIMENSIONS):
        raise LayoutInvalid(
            f"The order of a layout must name each of {', '.join(DIMENSIONS)} once, not"
            f" {', '.join(spec.order)}."
        )
    if (spec.dp * spec.cp) % spec.ep:
        raise LayoutInvalid(f"ep={spec.ep} does not divide dp*cp={spec.dp * spec.cp}.")
    dimensions = tuple(Dimension(name=name, size=sizes[name]) for name in spec.order)
    strides = list(itertools.accumulate((d.size for d in dimensions), initial=1, func=int.__mul__))
    if strides[-1] % ranks_per_machine:
        raise LayoutInvalid(
            f"tp*cp*dp*pp = {strides[-1]} ranks do not fill machines of {ranks_per_machine} ranks."
        )
    shapes = [
        GroupShape(name=d.name, factors=((stride, d.size),))
        for d, stride in zip(dimensions, strides[:-1], strict=True)
        if d.size > 1
    ]
    if spec.ep > 1:
        shapes.append(GroupShape(name="ep", factors=_experts(spec, shapes)))
    return Layout(dimensions=dimensions, shapes=tuple(shapes), ranks_per_machine=ranks_per_machine)


def _experts(spec: LayoutSpec, shapes: list[GroupShape]) -> Factors:
    """The first `ep` ranks over dp and cp, in rank order."""
    over = merged([factor for s in shapes if s.name in ("dp", "cp") for factor in s.factors])
    found, left = [], spec.ep
    for stride, size in over:
        here = math.gcd(left, size)
        if here > 1:
            found.append((stride, here))
        left //= here
        if left > 1 and here < size:
            raise LayoutInvalid(
                f"ep={spec.ep} takes a part of {size} ranks and more beyond them: choose one that"
                f" divides {size} or is a multiple of it, or put dp and cp side by side in order=."
            )
    return tuple(found)


def merged(factors: Iterator[tuple[int, int]] | list[tuple[int, int]]) -> Factors:
    """The same ranks in as few factors as possible, the fastest first."""
    found: list[tuple[int, int]] = []
    for stride, size in sorted(factors):
        if size == 1:
            continue
        if found and found[-1][0] * found[-1][1] == stride:
            found[-1] = (found[-1][0], found[-1][1] * size)
        else:
            found.append((stride, size))
    return tuple(found)
