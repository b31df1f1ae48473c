"""The losses of this rank's last steps, kept in the machine's memory to be compared bit for bit.

Used by pulse.py. Where a script asked torch for deterministic algorithms, a step that is done again
after a restart must come to the same bits. If it does not, although steps before it did, something
computed wrong, then or now: silent corruption. The file outlives the rank; it is named after rank
and world size, so other layouts share nothing. One writer, a word at a time: nothing to tear.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from pathlib import Path

STEPS_KEPT = 1000
_ENTRY = struct.Struct("<qQ")  # step + 1, the loss's 64 bits


class Recall:
    """One rank's ring of losses."""

    def __init__(self, directory: Path, rank: int, world_size: int) -> None:
        """OSError if shared memory has no 16 KB left."""
        path = directory / f"losses-{rank}-of-{world_size}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = STEPS_KEPT * _ENTRY.size
            os.posix_fallocate(fd, 0, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._same = False
        """A step was done again and came to the same bits: they can be compared at all."""

    def differs(self, step: int, loss: float) -> bool:
        """Keep the loss of a step; whether it was done before and came to other bits.

        Not if the first step that was done again differs: then its data or its order does.
        """
        at = step % STEPS_KEPT * _ENTRY.size
        (bits,) = struct.unpack("<Q", struct.pack("<d", loss))
        known, before = _ENTRY.unpack_from(self._map, at)
        _ENTRY.pack_into(self._map, at, step + 1, bits)
        if known != step + 1:
            return False
        if before == bits:
            self._same = True
        return before != bits and self._same

    def close(self) -> None:
        self._map.close()


def deterministic() -> bool:
    """Whether the script asked for bits that can be compared."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.are_deterministic_algorithms_enabled())
