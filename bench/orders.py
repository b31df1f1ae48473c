"""What bench/checkpoint.py orders its script to do, and what each rank of the script tells back.

Both are files of JSON lines. The benchmark appends orders to one file; ranks take them one by one,
and wait without using the processor while there is none. Each rank appends to a file of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

LEFTOVERS = "dlrover-leaves"
"""File in the directory for checkpoints: the name under which DLRover leaves things elsewhere."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One turn: so many steps, each saved in this way."""

    saver: str
    """A name in checkpoint_savers.py; "none"; or "copies": no steps, but plain copies of memory."""
    units: int = 0
    """Of extra work in each forward and backward pass."""
    steps: int = 0
    """0: until the next order is there."""


class Took(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One step of one rank."""

    order: int
    """Index of the order."""
    begun: float
    """Wall clock, in seconds."""
    compute_s: float
    """Forward and backward, with the extra work."""
    step_s: float
    """All of it, with the optimizer and the save."""
    save_s: float
    """The call that saves; without `queued_s`."""
    wait_s: float
    """What saving made the optimizer wait."""
    queued_s: float
    """Before a save could begin, because the one before it was still being written."""
    memory_bytes: int
    """Of this process, private and shared, after the step."""

    @property
    def blocked_s(self) -> float:
        return self.save_s + self.wait_s


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order is carried out, and nothing of it goes on in the background of this rank."""

    order: int
    memory_bytes: int
    """Of this process, private and shared, now."""
    error: str = ""


class Restored(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The rank has loaded a step."""

    step: int
    took_s: float


class Copied(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One plain copy of all saved tensors, by one thread, all ranks at the same time."""

    total_bytes: int
    touched_s: float
    """Into memory that was written before."""
    fresh_s: float
    """Into new memory, as whoever allocates its state anew must."""


Told = Took | Done | Restored | Copied
_TOLD: msgspec.json.Decoder[Told] = msgspec.json.Decoder(Told)


def add_order(file: Path, order: Order) -> None:
    with file.open("ab") as opened:
        opened.write(msgspec.json.encode(order) + b"\n")


def read_orders(file: Path) -> list[Order]:
    return [msgspec.json.decode(line, type=Order) for line in whole_lines(file)]


def tell(file: Path, told: Told) -> None:
    with file.open("ab") as opened:
        opened.write(msgspec.json.encode(told) + b"\n")


def read_told(file: Path) -> list[Told]:
    return [_TOLD.decode(line) for line in whole_lines(file)]


def whole_lines(file: Path) -> Iterator[bytes]:
    """Without an unfinished one at the end; none if there is no file yet."""
    content = file.read_bytes() if file.exists() else b""
    yield from content[: content.rfind(b"\n") + 1].splitlines()
