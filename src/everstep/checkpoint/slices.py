"""Replicated tensors are kept once, on disk and by peers: of each replica, its slice of them.

A part is what one rank writes to disk, or sends to its peer, instead of its shard's payload:

    mark, length, PartHead     what is there, and checksums of everything that should be there
    the payload without the other replicas' slices, in the order of the payload

join() makes the payload again out of a part and what the other replicas hold: parts, whole payloads
or excerpts, which are parts cut down to what one reader lacks. That replicas truly hold the same
bytes is checked twice: their checksums are compared before a step counts (on disk by differing(),
of backups by core/replicas.py), and the joined payload must have the very digest that its rank's
slot had, on disk its checksum, too. No torch here.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import mmap
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

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
from everstep.model import Rank, Replicated, Value, spans_of

_START = struct.Struct("<QQ")
_MARK = int.from_bytes(b"\xffEVPART\xff", "little")
"""No payload begins so: it would be the length of an index of exabytes."""

DIGEST_DIGITS = 16
"""Hex digits of a digest: chance makes no two of a job's equal."""

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
    crc: int | None
    """Of the whole payload, on disk."""
    ranges: tuple[tuple[int, int], ...]
    """Begin and end in the payload of what the part holds, in order."""
    replicas: tuple[tuple[Rank, ...], ...]
    sums: tuple[Sum, ...]


class Part:
    """What one rank writes: chunks that follow each other."""

    def __init__(self, head: PartHead, chunks: Iterable[memoryview]) -> None:
        """`chunks`: one for each of the head's ranges."""
        body = msgspec.msgpack.encode(head)
        start = _START.pack(_MARK, len(body)) + body
        self.head = head
        self.chunks = [memoryview(start.ljust(padded(len(start), PAGE), b"\0")), *chunks]

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
    """What a rank writes of its shard, in chunks that follow each other: a part of it if it can."""
    part = None if whole else try_cut(shard)
    return [shard.payload] if part is None else part.chunks


def cut(shard: Shard, *, with_crc: bool = True) -> Part | None:
    """What this rank writes of its shard; None if nothing of it is replicated. Raises ShardBad.

    `with_crc`: compute that of the whole, for whoever checks it without torch.
    """
    index, tensors_at = unpack_index(shard.payload)
    rank = shard.header.rank
    if all(entry.replicas == NO_REPLICAS for entry in index.tensors):
        return None
    if any(rank not in index.replicas[number] for number in _used(index)):
        raise ShardBad(f"{shard.where} is no replica of what it holds")
    sums = []
    for (name, tensor), entry in zip(keys_of(index), index.tensors, strict=True):
        if entry.replicas == NO_REPLICAS:
            continue
        begin = tensors_at + entry.offset
        crc = crc_of(shard.payload[begin : begin + entry.nbytes])
        sums.append(
            Sum(entry=name, tensor=tensor, replicas=entry.replicas, nbytes=entry.nbytes, crc=crc)
        )
    size = len(shard.payload)
    head = PartHead(
        payload_bytes=size,
        crc=crc_of(shard.payload) if with_crc else None,
        ranges=tuple(_between(sorted(_left_out(index, tensors_at, rank)), size)),
        replicas=index.replicas,
        sums=tuple(sums),
    )
    return Part(head, (shard.payload[begin:end] for begin, end in head.ranges))


def try_cut(shard: Shard, *, with_crc: bool = True) -> Part | None:
    """The same of a slot; None also if its index cannot be read.

    Then it is being overwritten, which the caller notices, or was damaged, which restoring does.
    """
    try:
        return cut(shard, with_crc=with_crc)
    except ShardBad:
        return None


def excerpt(shard: Shard, reader: Rank) -> Part:
    """Of what another rank holds, whole or as a part: its slices of what the reader has, too.

    Raises ShardBad.
    """
    opened = _Opened(shard)
    index, at = opened.index, opened.tensors_at
    for_reader = [reader in members for members in index.replicas]
    slices = [
        (at + index.tensors[number].offset + begin, at + index.tensors[number].offset + end)
        for number, begin, end in _slices(index, shard.header.rank)
        if for_reader[index.tensors[number].replicas]
    ]
    head = PartHead(
        payload_bytes=opened.payload_bytes,
        crc=None,
        ranges=((0, at), *sorted(slices)),
        replicas=index.replicas,
        sums=(),
    )
    return Part(head, [opened.bytes(begin, end) for begin, end in head.ranges])


def part_bytes(index: ShardIndex, payload_bytes: int, rank: Rank) -> int:
    """About how much cut() leaves of such a payload."""
    used = sum(entry.replicas != NO_REPLICAS for entry in index.tensors)
    if not used:
        return payload_bytes
    return payload_bytes - sum(end - begin for begin, end in _left_out(index, 0, rank))


def _used(index: ShardIndex) -> list[int]:
    """Numbers of the sets of replicas that tensors name."""
    return sorted({entry.replicas for entry in index.tensors} - {NO_REPLICAS})


def _slices(index: ShardIndex, rank: Rank) -> Iterator[tuple[int, int, int]]:
    """The rank's slices: number of the tensor, begin and end in it. Empty ones are left out."""
    places = [members.index(rank) if rank in members else None for members in index.replicas]
    for number, entry in enumerate(index.tensors):
        place = None if entry.replicas == NO_REPLICAS else places[entry.replicas]
        if place is not None:
            begin, end = slice_of(entry.nbytes, len(index.replicas[entry.replicas]), place)
            if begin < end:
                yield number, begin, end


def _left_out(index: ShardIndex, tensors_at: int, rank: Rank) -> Iterator[tuple[int, int]]:
    """Begin and end in the payload of what is not this rank's to write."""
    own = {number: (begin, end) for number, begin, end in _slices(index, rank)}
    for number, entry in enumerate(index.tensors):
        if entry.replicas != NO_REPLICAS:
            at = tensors_at + entry.offset
            begin, end = own.get(number, (0, 0))
            yield at, at + begin
            yield at + end, at + entry.nbytes


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


def sharing(head: PartHead) -> tuple[Rank, ...]:
    """With which ranks the part must be joined, its own among them."""
    return tuple(sorted({rank for item in head.sums for rank in head.replicas[item.replicas]}))


def replicated(head: PartHead, rank: Rank) -> tuple[Replicated, ...]:
    """What this rank has of each set of replicas, in a few bytes: equal on all that are some."""
    sums: dict[int, list[Sum]] = {}
    for item in head.sums:
        sums.setdefault(item.replicas, []).append(item)
    found = []
    for number, items in sums.items():
        said = sorted((item.entry, item.tensor, item.nbytes, item.crc) for item in items)
        digest = hashlib.sha256(msgspec.msgpack.encode(said)).hexdigest()[:DIGEST_DIGITS]
        members = spans_of(head.replicas[number])
        found.append(Replicated(rank=rank, replicas=members, digest=digest))
    return tuple(found)


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


def join(
    shard: Shard,
    open_other: Callable[[Rank], Shard],
    room: Callable[[int], memoryview] | None = None,
) -> Shard:
    """The whole shard of a part; a whole one as it is.

    `open_other` opens what another rank holds of the same step, one after the other, and may raise.
    `room` gives so many bytes for the payload; None: private memory. Raises ShardBad; verify() of
    the result tells whether it is what the rank had in memory.
    """
    head, _ = _head(shard.payload)
    if head is None:
        return shard
    own = _Opened(shard)
    size = head.payload_bytes
    payload = memoryview(mmap.mmap(-1, size)) if room is None else room(size)
    for begin, end in head.ranges:
        payload[begin:end] = own.bytes(begin, end)
    joined = []
    for rank in _others(own.index, shard.header.rank):
        slices = list(_slices(own.index, rank))
        if not slices:
            continue
        other = _Opened(open_other(rank))
        joined.append(rank)
        for number, begin, end in slices:
            at = own.tensors_at + own.index.tensors[number].offset
            payload[at + begin : at + end] = other.tensor(own.keys[number], begin, end)
    header = msgspec.structs.replace(shard.header, payload_bytes=size)
    names = ", ".join(map(str, sorted(joined)))
    return Shard(header, head.crc, payload, f"{shard.where} with the slices of ranks {names}")


def _others(index: ShardIndex, rank: Rank) -> list[Rank]:
    """The other replicas of what a rank holds, from the next one on: readers spread over them."""
    others = {other for number in _used(index) for other in index.replicas[number]} - {rank}
    return sorted(others, key=lambda other: (other < rank, other))


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
        self.payload_bytes = head.payload_bytes if head else size
        self.index, self.tensors_at = unpack_index(begin, self.payload_bytes)
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
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ShardBad(f"the table of a part cannot be read: {error}") from error
    at = padded(length, PAGE)
    held = sum(end - begin for begin, end in head.ranges)
    there = (len(payload) if size is None else size) - at
    if held != there or any(e > head.payload_bytes for _, e in head.ranges):
        raise ShardBad(f"a part holds {there} bytes, but its table says {held}")
    return head, at
