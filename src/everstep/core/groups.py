"""Layout arithmetic: ranks, parallel groups, and the machines that a group covers.

Pure; used by placement.py and, later, by whatever evicts groups. Words as in torch.distributed and
Megatron: a dimension is tp, cp, dp or pp; a group of a dimension is the ranks that differ in that
coordinate only. Expert parallelism (ep) divides the ranks of one tp and pp coordinate, taken in
rank order over dp and cp, into blocks of `ep` ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from everstep.model import LayoutSpec, NodeRank, Rank, UserError

DIMENSIONS = LayoutSpec().order


class LayoutInvalid(UserError):
    """The sizes do not describe the ranks of the job."""


class Layout(LayoutSpec, frozen=True, kw_only=True):
    """Sizes and order of the parallel dimensions, and how many ranks one machine has."""

    ranks_per_machine: int = 1

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in (*DIMENSIONS, "ep", "ranks_per_machine")}
        wrong = [f"{name}={size}" for name, size in sizes.items() if size < 1]
        if wrong:
            raise LayoutInvalid(f"Sizes of a layout must be at least 1, not {', '.join(wrong)}.")
        if sorted(self.order) != sorted(DIMENSIONS):
            raise LayoutInvalid(
                f"The order of a layout must name each of {', '.join(DIMENSIONS)} once, not"
                f" {', '.join(self.order)}."
            )
        if self.world_size % self.ranks_per_machine:
            raise LayoutInvalid(
                f"tp*cp*dp*pp = {self.world_size} ranks do not fill machines of"
                f" {self.ranks_per_machine} ranks."
            )
        if (self.dp * self.cp) % self.ep:
            raise LayoutInvalid(f"ep={self.ep} does not divide dp*cp={self.dp * self.cp}.")

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def machines(self) -> int:
        return self.world_size // self.ranks_per_machine

    def sizes(self) -> tuple[int, ...]:
        """In `order`."""
        return tuple(getattr(self, name) for name in self.order)

    def coordinates(self, rank: Rank) -> tuple[int, ...]:
        """In `order`."""
        found = []
        rest: int = rank
        for size in self.sizes():
            rest, coordinate = divmod(rest, size)
            found.append(coordinate)
        return tuple(found)

    def rank(self, coordinates: tuple[int, ...]) -> Rank:
        """Of coordinates in `order`."""
        found = 0
        for size, coordinate in zip(reversed(self.sizes()), reversed(coordinates), strict=True):
            found = found * size + coordinate
        return Rank(found)

    def machine(self, rank: Rank) -> NodeRank:
        return NodeRank(rank // self.ranks_per_machine)

    def groups(self) -> Iterator[tuple[str, tuple[Rank, ...]]]:
        """Every group of more than one rank, with the name of its dimension."""
        for at, name in enumerate(self.order):
            if getattr(self, name) > 1:
                yield from ((name, group) for group in self._along(at))
        if self.ep > 1:
            yield from (("ep", group) for group in self._expert_groups())

    def _along(self, at: int) -> Iterator[tuple[Rank, ...]]:
        stride = math.prod(self.sizes()[:at])
        size = self.sizes()[at]
        for rank in range(self.world_size):
            if (rank // stride) % size == 0:
                yield tuple(Rank(rank + stride * k) for k in range(size))

    def _expert_groups(self) -> Iterator[tuple[Rank, ...]]:
        fixed = [self.order.index("tp"), self.order.index("pp")]
        members: dict[tuple[int, ...], list[Rank]] = {}
        for number in range(self.world_size):
            rank = Rank(number)
            coordinates = self.coordinates(rank)
            members.setdefault(tuple(coordinates[at] for at in fixed), []).append(rank)
        for ranks in members.values():
            for start in range(0, len(ranks), self.ep):
                yield tuple(ranks[start : start + self.ep])

    def machines_of(self, group: tuple[Rank, ...]) -> frozenset[NodeRank]:
        """What is evicted when the group is."""
        return frozenset(self.machine(rank) for rank in group)
