"""Where this rank runs: what the agent said, and how many ranks share the machine's memory."""

from __future__ import annotations

from everstep.model import Value
from everstep.trainer.context import AttachContext


class Place(Value, frozen=True, kw_only=True):
    """Made by attach(), read by run.py and checkpoint.py."""

    context: AttachContext
    local_ranks: int
    """torchrun's LOCAL_WORLD_SIZE."""
