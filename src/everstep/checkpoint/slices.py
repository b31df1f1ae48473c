"""Replicated tensors are written to disk once: each replica writes its slice of them.

A part is what one rank writes instead of its shard's payload:

    mark, length, PartHead     what is there, and checksums of everything that should be there
    the payload without the replicas' slices, in the order of the payload

join() makes the payload again out of the parts of all replicas. That replicas truly hold the same
bytes is checked twice: differing() compares their checksums before a step is published, and the
joined payload must have the very digest and checksum that its rank's slot had. No torch here.
"""

from __future__ import annotations

import bisect
import itertools
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from everstep.checkpoint.format import (
    ALIGN,
    NO_REPLICAS,
    PAGE,
    Expected,
    Shard,
    ShardBad,
    ShardIndex,
    crc_of,
    padded,
    unpack_index,
)
from everstep.model import Rank, Value

_START = struct.Struct("<QQ")
_MARK = int.from_bytes(b"\xffEVPART\xff", "little")
"""No payload begins so: it would be the length of an index of exabytes."""

Key = tuple[str, int]
"""Name of an entry, and which of its tensors: replicas count alike."""


class Sum(Value, frozen=True, kw_only=True, array_like=True):
    """One replicated tensor, as this rank has it."""

    entry: str
    tensor: int
    """Its number within the entry."""
    replicas: int
    """Number in PartHead.replicas."""
    nbytes: int
    crc: int


class PartHead(Value, frozen=True, kw_only=True, array_like=True):
    """The table of contents of a part."""

    payload_bytes: int
    crc: int
    """Of the whole payload."""
    ranges: tuple[tuple[int, int], ...]
    """Begin and end in the payload of what the part holds, in order."""
    replicas: tuple[tuple[Rank, ...], ...]
    sums: tuple[Sum, ...]


class Part:
    """What one rank writes: chunks that follow each other."""

    def __init__(self, head: PartHead, payload: memoryview) -> None:
        body = msgspec.msgpack.encode(head)
        start = _START.pack(_MARK, len(body)) + body
        self.chunks = [memoryview(start.ljust(padded(len(start), PAGE), b"\0"))]
        self.chunks += [payload[begin:end] for begin, end in head.ranges]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.chunks))


class ReplicasDiffer(ShardBad):
    """Ranks that wrote slices of the same tensors did not have the same: nobody can join them."""


# --- writing -------------------------------------------------------------------------------------


def slice_of(nbytes: int, count: int, position: int) -> tuple[int, int]:
    """Begin and end of what the replica at this position of `count` is responsible for."""
    size = padded(-(-nbytes // count), ALIGN)
    return min(position * size, nbytes), min((position + 1) * size, nbytes)


def chunks_of(shard: Shard, *, whole: bool) -> list[memoryview]:
    """What a rank writes of its shard, in chunks that follow each other: a part of it if it can.

    An index that cannot be read is a slot that is being overwritten, which the writer notices in
    the end, or one that was damaged, which restoring does.
    """
    try:
        part = None if whole else cut(shard)
    except ShardBad:
        part = None
    return [shard.payload] if part is None else part.chunks


def cut(shard: Shard) -> Part | None:
    """What this rank writes of its shard; None if nothing of it is replicated. Raises ShardBad."""
    index, tensors_at = unpack_index(shard.payload)
    if all(entry.replicas == NO_REPLICAS for entry in index.tensors):
        return None
    left_out: list[tuple[int, int]] = []
    sums = []
    keys = keys_of(index)
    for number, entry in enumerate(index.tensors):
        if entry.replicas == NO_REPLICAS:
            continue
        begin = tensors_at + entry.offset
        members = index.replicas[entry.replicas]
        if shard.header.rank not in members:
            raise ShardBad(f"{shard.where} is no replica of what it holds")
        own, end = slice_of(entry.nbytes, len(members), members.index(shard.header.rank))
        left_out += [(begin, begin + own), (begin + end, begin + entry.nbytes)]
        crc = crc_of(shard.payload[begin : begin + entry.nbytes])
        name, tensor = keys[number]
        sums.append(
            Sum(entry=name, tensor=tensor, replicas=entry.replicas, nbytes=entry.nbytes, crc=crc)
        )
    head = PartHead(
        payload_bytes=len(shard.payload),
        crc=crc_of(shard.payload),
        ranges=tuple(_between(sorted(left_out), len(shard.payload))),
        replicas=index.replicas,
        sums=tuple(sums),
    )
    return Part(head, shard.payload)


def keys_of(index: ShardIndex) -> list[Key]:
    """For each tensor, where it belongs."""
    found: list[Key] = []
    firsts = [entry.first for entry in index.entries]
    for number in range(len(index.tensors)):
        owner = bisect.bisect_right(firsts, number) - 1
        if owner < 0:
            raise ShardBad("a shard's index has tensors of no entry")
        found.append((index.entries[owner].name, number - firsts[owner]))
    return found


def _between(left_out: Sequence[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    at = 0
    for begin, end in left_out:
        if begin > at:
            yield at, begin
        at = max(at, end)
    if size > at:
        yield at, size


# --- comparing -----------------------------------------------------------------------------------


def head_of(payload: memoryview, size: int | None = None) -> PartHead | None:
    """What a part says; None if this is a whole payload. Raises ShardBad.

    Only the first head_bytes() are needed; `size` is then the length of all.
    """
    return _head(payload, size)[0]


def head_bytes(beginning: memoryview) -> int:
    """Length of a part's head with what comes before it, from its first bytes; 0: no part."""
    if len(beginning) < _START.size:
        return 0
    mark, length = _START.unpack_from(beginning, 0)
    return _START.size + length if mark == _MARK else 0


def sets_of(heads: Mapping[Rank, PartHead | None]) -> tuple[tuple[Rank, ...], ...]:
    """The sets of ranks that wrote slices of the same tensors. Raises ReplicasDiffer."""
    why = differing(heads)
    if why is not None:
        raise ReplicasDiffer(f"{why}: the step is no use, and the next is written whole")
    sets = {members for head in heads.values() if head for members in head.replicas}
    return tuple(sorted(sets))


def differing(heads: Mapping[Rank, PartHead | None]) -> str | None:
    """A sentence about replicas that are none; None if all of them are. None as a head: whole."""
    first: dict[tuple[tuple[Rank, ...], str, int], tuple[Rank, Sum]] = {}
    seen: dict[tuple[tuple[Rank, ...], str, int], int] = {}
    for rank, head in heads.items():
        for item in head.sums if head is not None else ():
            members = head.replicas[item.replicas] if head is not None else ()
            key = (members, item.entry, item.tensor)
            other, known = first.setdefault(key, (rank, item))
            seen[key] = seen.get(key, 0) + 1
            if (known.nbytes, known.crc) != (item.nbytes, item.crc):
                return (
                    f"tensor {item.tensor} of {item.entry!r} is not the same on ranks {other} and "
                    f"{rank}, which should be replicas"
                )
    for (members, entry, tensor), count in seen.items():
        if count != len(members):
            return (
                f"tensor {tensor} of {entry!r} is on {count} of the ranks "
                f"{', '.join(map(str, members))}, which should be replicas"
            )
    return None


# --- reading -------------------------------------------------------------------------------------


def whole(shard: Shard, open_file: Callable[[Expected], Shard]) -> Shard:
    """The whole shard of what one rank wrote. `open_file` opens what another wrote; both raise."""
    if head_of(shard.payload) is None:
        return shard
    shard.verify()
    header = shard.header

    def open_other(rank: Rank) -> Shard:
        wanted = Expected(
            step=header.step,
            rank=rank,
            generation=header.generation,
            world_size=header.world_size,
        )
        return open_file(wanted)

    return join(shard, open_other)


def join(shard: Shard, open_other: Callable[[Rank], Shard]) -> Shard:
    """The whole shard of a part; a whole one as it is.

    `open_other` opens what another rank wrote of the same step, and may raise: one after the other,
    so that one of them is in memory at a time. Raises ShardBad; verify() of the result tells
    whether it is what the rank had in memory.
    """
    head, _ = _head(shard.payload)
    if head is None:
        return shard
    own = _Opened(shard)
    payload = memoryview(mmap.mmap(-1, head.payload_bytes))
    for begin, end in head.ranges:
        payload[begin:end] = own.bytes(begin, end)
    wanted = _wanted(own, shard.header.rank)
    for rank, pieces in wanted.items():
        other = _Opened(open_other(rank))
        for key, at, begin, end in pieces:
            payload[at + begin : at + end] = other.tensor(key, begin, end)
    header = msgspec.structs.replace(shard.header, payload_bytes=head.payload_bytes)
    joined = ", ".join(map(str, sorted(wanted)))
    return Shard(header, head.crc, payload, f"{shard.where} with the slices of ranks {joined}")


class _Piece(NamedTuple):
    """A slice that another rank wrote."""

    key: Key
    at: int
    """Where the tensor begins in the payload."""
    begin: int
    end: int


def _wanted(own: _Opened, own_rank: Rank) -> dict[Rank, list[_Piece]]:
    """What is missing in a part, by the rank that wrote it."""
    found: dict[Rank, list[_Piece]] = {}
    for number, entry in enumerate(own.index.tensors):
        if entry.replicas == NO_REPLICAS:
            continue
        members = own.index.replicas[entry.replicas]
        at = own.tensors_at + entry.offset
        for position, rank in enumerate(members):
            begin, end = slice_of(entry.nbytes, len(members), position)
            if rank != own_rank and begin < end:
                found.setdefault(rank, []).append(_Piece(own.keys[number], at, begin, end))
    return found


class _Opened:
    """What one rank wrote, a part or a whole payload, with access by places in the payload."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        head, self._at = _head(shard.payload)
        size = len(shard.payload)
        self._ranges = ((0, size),) if head is None else head.ranges
        if not self._ranges or self._ranges[0][0] != 0:
            raise ShardBad(f"{shard.where} lacks its index")
        self._firsts = [first for first, _ in self._ranges]
        sizes = (last - first for first, last in self._ranges)
        self._begins = list(itertools.accumulate(sizes, initial=self._at))
        begin = shard.payload[self._at : self._begins[1]]
        self.index, self.tensors_at = unpack_index(begin, head.payload_bytes if head else size)
        self.keys = keys_of(self.index)
        self._numbers = {key: number for number, key in enumerate(self.keys)}

    def tensor(self, key: Key, begin: int, end: int) -> memoryview:
        """Some bytes of a tensor."""
        number = self._numbers.get(key)
        if number is None:
            raise ShardBad(f"{self._shard.where} lacks tensor {key[1]} of {key[0]!r}")
        at = self.tensors_at + self.index.tensors[number].offset
        return self.bytes(at + begin, at + end)

    def bytes(self, begin: int, end: int) -> memoryview:
        number = bisect.bisect_right(self._firsts, begin) - 1
        first, last = self._ranges[number]
        if not first <= begin <= end <= last:
            raise ShardBad(f"{self._shard.where} does not hold bytes {begin} to {end} of its shard")
        at = self._begins[number] + begin - first
        return self._shard.payload[at : at + end - begin]


def _head(payload: memoryview, size: int | None = None) -> tuple[PartHead | None, int]:
    """The head of a part and where its bytes begin; None and 0 for a whole payload."""
    length = head_bytes(payload)
    if length == 0:
        return None, 0
    try:
        head = msgspec.msgpack.decode(payload[_START.size : length], type=PartHead)
    except msgspec.MsgspecError as error:
        raise ShardBad(f"the table of a part cannot be read: {error}") from error
    at = padded(length, PAGE)
    held = sum(end - begin for begin, end in head.ranges)
    there = (len(payload) if size is None else size) - at
    if held != there or any(e > head.payload_bytes for _, e in head.ranges):
        raise ShardBad(f"a part holds {there} bytes, but its table says {held}")
    return head, at
