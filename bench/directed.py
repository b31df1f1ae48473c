"""A job whose ranks do what they are ordered to, turn by turn. For bench/checkpoint.py."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

from launched import Job
from orders import Done, Order, Told, Took, add_order, read_told

TURN_WITHIN_S = 900.0
"""Seven steps of 5 s on a machine that is busy with much else."""
_Told = TypeVar("_Told", bound=Told)


class Step(NamedTuple):
    """One step of all ranks: what it took the slowest of them."""

    begun: float
    """Wall clock."""
    compute_s: float
    step_s: float
    blocked_s: float
    queued_s: float
    memory_bytes: int
    """Of all ranks together."""


class Turn(NamedTuple):
    """What came of one order. The first step is left out: it has the end of another turn in it."""

    steps: list[Step]
    left_bytes: int
    """What the ranks had in memory afterwards."""
    error: str

    @property
    def step_s(self) -> float:
        return median(step.step_s for step in self.steps)

    @property
    def compute_s(self) -> float:
        return median(step.compute_s for step in self.steps)

    @property
    def memory_bytes(self) -> int:
        return max(step.memory_bytes for step in self.steps)


class Directed:
    """A job, the file of its orders, and what its ranks told."""

    def __init__(self, job: Job, files: Path) -> None:
        """`files`: the directory of `orders` and `told`."""
        self.job = job
        self._orders = files / "orders"
        self._told = files / "told"
        self._told.mkdir(parents=True, exist_ok=True)
        self._next = 0

    def carry_out(self, order: Order) -> Turn:
        return self.finish(self.begin(order))

    def begin(self, order: Order) -> int:
        """Its index. An order without an end ends with the next one."""
        add_order(self._orders, order)
        self._next += 1
        return self._next - 1

    def finish(self, number: int) -> Turn:
        """Wait until all ranks have carried it out."""
        self.job.wait(
            lambda: len(self._done(number)) == self.job.ranks,
            f"end of turn {number}",
            TURN_WITHIN_S,
        )
        ranks = [
            [took for took in self._of(rank, Took) if took.order == number][1:]
            for rank in range(self.job.ranks)
        ]
        done = self._done(number)
        return Turn(
            steps=[_slowest(each) for each in zip(*ranks, strict=False)],
            left_bytes=sum(each.memory_bytes for each in done),
            error=max(each.error for each in done),
        )

    def told(self, kind: type[_Told]) -> list[list[_Told]]:
        """All of this kind, rank by rank."""
        return [self._of(rank, kind) for rank in range(self.job.ranks)]

    def _done(self, number: int) -> list[Done]:
        return [d for each in self.told(Done) for d in each if d.order == number]

    def _of(self, rank: int, kind: type[_Told]) -> list[_Told]:
        told = read_told(self._told / f"rank-{rank}")
        return [each for each in told if isinstance(each, kind)]


def _slowest(ranks: tuple[Took, ...]) -> Step:
    return Step(
        begun=min(took.begun for took in ranks),
        compute_s=max(took.compute_s for took in ranks),
        step_s=max(took.step_s for took in ranks),
        blocked_s=max(took.blocked_s for took in ranks),
        queued_s=max(took.queued_s for took in ranks),
        memory_bytes=sum(took.memory_bytes for took in ranks),
    )
