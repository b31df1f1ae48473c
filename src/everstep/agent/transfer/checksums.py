"""Checksums beside the transfer: one piece is checked on another core while the next is under way.

zlib holds no GIL while it computes, and a piece takes it nearly as long as the kernel takes to copy
it, so one after the other would halve the speed of a machine that has cores to spare. A thread for
each transfer, and none for a shard of a single piece.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Self

CHUNKS_MAX = 256
"""In one piece: the kernel takes no more than 1024 at once."""

Chunks = tuple[memoryview, ...]


class Piece(NamedTuple):
    """A piece that is to be sent."""

    chunks: Chunks
    crc: int
    """Of the payload up to the end of this piece."""


def pieces_of(chunks: Iterable[memoryview], size: int) -> Iterator[Piece]:
    """All pieces of a payload that lies in chunks.

    The checksum of the next one is computed while the caller sends this one.
    """
    whole = list(_gathered(chunks, size))
    if len(whole) == 1:
        yield Piece(whole[0], _crc(whole[0], 0))
        return
    with ThreadPoolExecutor(1) as pool:
        crc, coming = 0, pool.submit(_crc, whole[0], 0) if whole else None
        for number, piece in enumerate(whole):
            assert coming is not None
            crc = coming.result()
            if number + 1 < len(whole):
                coming = pool.submit(_crc, whole[number + 1], crc)
            yield Piece(piece, crc)


def _gathered(chunks: Iterable[memoryview], size: int) -> Iterator[Chunks]:
    """Long chunks are cut up, short ones go together."""
    found: list[memoryview] = []
    room = size
    for chunk in chunks:
        rest = chunk
        while rest:
            found.append(rest[:room])
            rest, room = rest[room:], room - len(found[-1])
            if not room or len(found) == CHUNKS_MAX:
                yield tuple(found)
                found, room = [], size
    if found:
        yield tuple(found)


def _crc(chunks: Chunks, crc: int) -> int:
    for chunk in chunks:
        crc = zlib.crc32(chunk, crc)
    return crc


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
