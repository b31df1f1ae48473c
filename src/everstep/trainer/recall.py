"""The losses of this rank's last steps, kept in the machine's memory to be compared bit for bit.

Used by pulse.py, which writes, and by agent/comparing.py, which reads. A step that is done again
after a restart shows whether other code computes the same. And where a script asked torch for
deterministic algorithms, it must come to the same bits: if it does not, although steps before it
did, something computed wrong, then or now: silent corruption. The file outlives the rank; it is
named after rank and world size, so other layouts share nothing. One writer.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

STEPS_KEPT = 1000
_ENTRY = struct.Struct("<qqQ")  # key, generation, the loss's 64 bits
_LOSS = struct.Struct("<d")
_BITS = struct.Struct("<Q")
_BYTES = STEPS_KEPT * _ENTRY.size


class Loss(NamedTuple):
    """What a step came to."""

    generation: int
    bits: int

    @property
    def value(self) -> float:
        (value,) = _LOSS.unpack(_BITS.pack(self.bits))
        return float(value)


class Recall:
    """One rank's ring of losses."""

    def __init__(self, directory: Path, rank: int, world_size: int, generation: int) -> None:
        """OSError if shared memory has no 24 KB left."""
        fd = os.open(_path(directory, rank, world_size), _CREATE, 0o600)
        try:
            os.posix_fallocate(fd, 0, _BYTES)
            self._map = mmap.mmap(fd, _BYTES)
        finally:
            os.close(fd)
        self._generation = generation
        self._same = False
        """A step was done again and came to the same bits: they can be compared at all."""

    def differs(self, step: int, loss: float, *, exact: bool) -> bool:
        """Keep the loss of a step; whether it was done before and should have had these bits.

        Only if it was `exact` both times: the script asked for bits that can be compared. Not if
        the first step that was done again differs: then its data or its order does.
        """
        at = step % STEPS_KEPT * _ENTRY.size
        (bits,) = _BITS.unpack(_LOSS.pack(loss))
        key = _key(step, exact=exact)
        known, _, before = _ENTRY.unpack_from(self._map, at)
        # Void while it is written: the agent may read at any moment.
        _ENTRY.pack_into(self._map, at, 0, 0, 0)
        _ENTRY.pack_into(self._map, at, 0, self._generation, bits)
        _KEY.pack_into(self._map, at, key)
        if known != key or not exact:
            return False
        if before == bits:
            self._same = True
        return before != bits and self._same

    def close(self) -> None:
        self._map.close()


def losses(directory: Path, rank: int, world_size: int, steps: Collection[int]) -> dict[int, Loss]:
    """What a rank has come to in these steps, as far as it is kept; whatever its generation."""
    try:
        content = _path(directory, rank, world_size).read_bytes()
    except OSError:
        return {}
    found: dict[int, Loss] = {}
    for step in steps:
        at = step % STEPS_KEPT * _ENTRY.size
        if at + _ENTRY.size > len(content):
            continue
        key, generation, bits = _ENTRY.unpack_from(content, at)
        if key in (_key(step, exact=False), _key(step, exact=True)):
            found[step] = Loss(generation, bits)
    return found


def deterministic() -> bool:
    """Whether the script asked for bits that can be compared."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.are_deterministic_algorithms_enabled())


_CREATE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
_KEY = struct.Struct("<q")


def _key(step: int, *, exact: bool) -> int:
    """Of an entry; 0 is of none."""
    return (step + 1) << 1 | exact


def _path(directory: Path, rank: int, world_size: int) -> Path:
    return directory / f"losses-{rank}-of-{world_size}"
