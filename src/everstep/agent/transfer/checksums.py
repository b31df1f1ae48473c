"""Checksums beside the transfer: one piece is checked on another core while the next is under way.

zlib holds no GIL while it computes, and a piece takes it nearly as long as the kernel takes to copy
it, so one after the other would halve the speed of a machine that has cores to spare. A thread for
each transfer, and none for a shard of a single piece.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Self


class Piece(NamedTuple):
    """A piece that is to be sent."""

    data: memoryview
    crc: int
    """Of the payload up to the end of this piece."""


def pieces_of(payload: memoryview, size: int) -> Iterator[Piece]:
    """All pieces; the checksum of the next one is computed while the caller sends this one."""
    whole = [payload[at : at + size] for at in range(0, len(payload), size)]
    if len(whole) == 1:
        yield Piece(whole[0], zlib.crc32(whole[0]))
        return
    with ThreadPoolExecutor(1) as pool:
        crc, coming = 0, pool.submit(zlib.crc32, whole[0]) if whole else None
        for number, data in enumerate(whole):
            assert coming is not None
            crc = coming.result()
            if number + 1 < len(whole):
                coming = pool.submit(zlib.crc32, whole[number + 1], crc)
            yield Piece(data, crc)


class Checks:
    """Compares what came with what was announced, one piece behind. A context manager."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._crc = 0
        self._pending: tuple[Future[int], int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def expect(self, piece: memoryview, crc: int) -> bool:
        """Begin to check this piece; whether the one before it was right."""
        right = self.right()
        # From what was announced for the piece before: that one is compared with it, too.
        self._pending = (self._pool.submit(zlib.crc32, piece, self._crc), crc)
        self._crc = crc
        return right

    def right(self) -> bool:
        """Whether the newest piece was right."""
        if self._pending is None:
            return True
        future, crc = self._pending
        return future.result() == crc
