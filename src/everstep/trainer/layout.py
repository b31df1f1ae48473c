"""What a script may ask about its data-parallel replicas: how many there are, and should be.

Run.layout makes it. A job that goes on with fewer replicas keeps its global batch if the script
does the micro-steps of those that are missing, too (gradient accumulation).
"""

from __future__ import annotations

import os

from everstep.model import Value
from everstep.trainer.context import AttachContext


class Layout(Value, frozen=True, kw_only=True):
    """Of one rank, and fixed while it lives."""

    world_size: int
    """Ranks now."""
    dp: int
    """Data-parallel replicas now."""
    dp_full: int
    """Data-parallel replicas that the job was submitted with: the global batch is theirs."""
    replica: int
    """To which one this rank belongs, from 0 to dp - 1."""

    @property
    def shares(self) -> range:
        """Of the dp_full replicas, those whose part of the global batch is this replica's now.

        All replicas together have each part once: ask the data for these.
        """
        return range(self.replica, self.dp_full, self.dp)

    @property
    def accumulate(self) -> int:
        """How many times as many micro-steps to do before an update: 1 while all replicas are
        there. The same on all of them, since micro-steps may communicate.
        """
        return -(-self.dp_full // self.dp)

    @property
    def micro_steps(self) -> tuple[tuple[int, float], ...]:
        """`accumulate` times the part of the global batch to compute, and what to multiply its loss
        by. Gradients that are averaged over the replicas, as DDP and FSDP do, are then those of the
        mean over the whole batch. Where it does not come out even, some get a part that another
        one has too, with 0.
        """
        weight = self.dp / self.dp_full
        mine = [(part, weight) for part in self.shares]
        return (*mine, *[(self.replica, 0.0)] * (self.accumulate - len(mine)))


def layout_of(context: AttachContext | None) -> Layout:
    """Outside everstep: what torchrun's variables say, with one replica for each rank."""
    if context is not None:
        return Layout(
            world_size=context.world_size,
            dp=context.dp,
            dp_full=context.dp_full,
            replica=context.replica,
        )
    world_size, rank = _number("WORLD_SIZE", 1), _number("RANK", 0)
    return Layout(world_size=world_size, dp=world_size, dp_full=world_size, replica=rank)


def _number(name: str, otherwise: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else otherwise
