"""Records in shared memory that one process writes and others read without a lock.

A file has one entry of a fixed size for each local rank: a number in front, a body, and the same
number at its end. The writer makes the number in front odd, writes the body, then writes the next
even number at the back and in front. A reader that sees two different or odd numbers has read a
torn record and keeps the value it had. A writer killed in the middle leaves the entry torn for
ever, which is right: its last whole value is the truth about it.

The entry outlives rank, launcher and agent. Used by heartbeat.py and pace.py, for their formats.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

_EDGE = struct.Struct("Q")  # native: one machine word, so never half of a number
BODY_AT = _EDGE.size
EDGES_BYTES = 2 * _EDGE.size
"""Of each entry, for the two numbers."""
_Record = TypeVar("_Record")


def is_whole(entry: bytes) -> bool:
    """False if it is torn, being written, or was never written."""
    (front,) = _EDGE.unpack_from(entry, 0)
    (back,) = _EDGE.unpack_from(entry, len(entry) - _EDGE.size)
    return bool(front == back and front % 2 == 0 and front != 0)


class Writer:
    """The one writer of one entry. Creating a second one for the same entry continues its numbers.

    Not for several threads at once.
    """

    def __init__(self, path: Path, index: int, entry_bytes: int) -> None:
        self._map = _mapped(path, (index + 1) * entry_bytes)
        self._at = index * entry_bytes
        self._back_at = self._at + entry_bytes - _EDGE.size
        (front,) = _EDGE.unpack_from(self._map, self._at)
        self._number = front + front % 2

    def write(self, body: bytes) -> None:
        begin, number = self._at + BODY_AT, self._number + 2
        _EDGE.pack_into(self._map, self._at, number - 1)
        self._map[begin : begin + len(body)] = body
        _EDGE.pack_into(self._map, self._back_at, number)
        _EDGE.pack_into(self._map, self._at, number)
        self._number = number

    def store(self, offset: int, word: int) -> None:
        """One word of the entry that is outside of its body: stored at once, and never torn."""
        _EDGE.pack_into(self._map, self._at + offset, word)

    def close(self) -> None:
        self._map.close()


class Reader(Generic[_Record]):
    """Reads all entries of one machine; a torn one reads as the value it had before."""

    def __init__(
        self,
        path: Path,
        count: int,
        entry_bytes: int,
        unpack: Callable[[bytes], _Record | None],
    ) -> None:
        """`unpack`: None for what is torn or no record."""
        self._map = _mapped(path, count * entry_bytes)
        self._entry_bytes = entry_bytes
        self._unpack = unpack
        self._last: list[_Record | None] = [None] * count

    def read(self) -> list[_Record | None]:
        """One for each local rank; None where no rank ever wrote."""
        for index in range(len(self._last)):
            at = index * self._entry_bytes
            record = self._unpack(self._map[at : at + self._entry_bytes])
            if record is not None:
                self._last[index] = record
        return list(self._last)

    def words(self, offset: int) -> list[int]:
        """What was stored at this offset of each entry. Any thread may ask."""
        return [
            _EDGE.unpack_from(self._map, index * self._entry_bytes + offset)[0]
            for index in range(len(self._last))
        ]

    def close(self) -> None:
        self._map.close()


def _mapped(path: Path, size: int) -> mmap.mmap:
    """Map the file, created and extended as needed. Pages are reserved, so no later SIGBUS."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = max(size, os.fstat(fd).st_size)
        os.posix_fallocate(fd, 0, size)
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)
