"""What a machine keeps for others: the newest backups of ranks whose machine may be lost.

    SHM/backup/rank-R/slot-0, slot-1     the same format as a rank's own slots; of what replicas
                                         hold alike only this rank's slice (slices.py)

Two slots for each rank: one holds the step that is machine-safe (all peers of the job have it), the
other takes the next one. The safe one is never overwritten, so whatever breaks in a transfer, the
former backup stays whole; what is torn has no header and is offered to nobody.

Used by the threads of the agent's shard server (agent/transfer/), and by the agent itself for its
inventory. No torch here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from everstep.checkpoint import format as shards
from everstep.checkpoint import slices, slots
from everstep.checkpoint.budget import room_in
from everstep.checkpoint.format import PAGE, Expected, Header, Shard, ShardBad
from everstep.checkpoint.need import RECEIVED, in_words, segment_bytes
from everstep.checkpoint.slots import Held, Segment, ShardMissing, SharedMemoryTooSmall
from everstep.model import Copy, EverstepError, Rank, Step, spans_of
from everstep.paths import kept_shm, rank_shm


class KeptBusy(EverstepError):
    """The slot that could be overwritten is being read: try again."""


def choose_kept(
    held: Sequence[Held | None], step: Step, safe: Step, busy: Collection[int] = ()
) -> int | None:
    """The slot that a backup of `step` overwrites; None if all are the safe step's or busy.

    First one of the same step, which is sent again, then a torn one, then one of an abandoned
    future, then the oldest. Of the safe step one copy is kept.
    """
    kept = next((index for index, found in enumerate(held) if found and found.step == safe), None)

    def worth(index: int) -> tuple[int, int]:
        found = held[index]
        if found is None:
            return (1, index)
        order = 0 if found.step == step else 2 if found.step > step else 3
        return (order, found.step)

    free = [index for index in range(len(held)) if index not in busy and index != kept]
    return min(free, key=worth, default=None)


class Taking:
    """A backup on its way in: where its bytes go. Until Kept.commit() there is no shard."""

    def __init__(self, segment: Segment, header: Header) -> None:
        self.header = header
        self.page = segment.whole[:PAGE]
        self.payload = segment.whole[PAGE : PAGE + header.payload_bytes]


class Kept:
    """The backups on one machine. Any thread may use it."""

    def __init__(self, shm: Path) -> None:
        self._root = kept_shm(shm)
        self._lock = threading.Lock()
        self._segments: dict[tuple[Rank, int], Segment] = {}
        """Mapped once: mapping gigabytes again for every backup would cost more than it saves."""
        self._maps = slots.Maps()
        self._read: dict[tuple[Rank, int], int] = {}
        """How many readers a slot has."""

    def inventory(self) -> list[Copy]:
        """All complete backups, by rank and step. Of parts the table is read, and no more."""
        return [
            copy
            for rank in slots.ranks_in(self._root)
            for copy in sorted(_copies_in(rank_shm(self._root, rank)), key=lambda c: c.step)
            if copy.rank == rank
        ]

    def holds(self, header: Header) -> bool:
        """Whether this very shard is here: it need not be sent again."""
        found = slots.headers_in(rank_shm(self._root, header.rank)).values()
        return any(replace(each, sequence=header.sequence) == header for each in found)

    def reserve(self, header: Header) -> None:
        """Make room in both slots at once, so that only a state that grows is refused later.

        One at a time for each rank. Raises SharedMemoryTooSmall with the figure needed.
        """
        directory = rank_shm(self._root, header.rank)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        wanted = PAGE + header.payload_bytes
        mine = [self._segment(header.rank, index) for index in range(RECEIVED)]
        short = [segment for segment in mine if segment.size < wanted]
        if not short:
            return
        size = segment_bytes(header.payload_bytes)
        more = sum(size - segment.size for segment in short)
        what = (
            f"{in_words(more)} more are needed for the backups of rank {header.rank}"
            f" ({RECEIVED} x {in_words(header.payload_bytes)})"
        )
        room = room_in(directory)
        if more > room.free_bytes:
            raise SharedMemoryTooSmall(f"{what}, but {room}: {_ADVICE}")
        try:
            for segment in short:
                segment.grow(size)
        except OSError as error:
            raise SharedMemoryTooSmall(f"{what}, but {error.strerror}: {_ADVICE}") from error

    def begin(self, header: Header, safe: Step) -> Taking:
        """Void the slot that may be overwritten. The caller fills it, and then commits it.

        One at a time for each rank, and after reserve(). Raises KeptBusy, and voids nothing.
        """
        rank = header.rank
        with self._lock:
            found = slots.headers_in(rank_shm(self._root, rank))
            held = [
                Held(step=found[n].step, generation=found[n].generation) if n in found else None
                for n in range(RECEIVED)
            ]
            busy = [n for n in range(RECEIVED) if self._read.get((rank, n))]
            index = choose_kept(held, header.step, safe, busy)
            if index is None:
                raise KeptBusy(
                    f"both backups of rank {rank} are needed now: step {safe} is the machine-safe"
                    " one, and the other is being fetched"
                )
            taking = Taking(self._segments[rank, index], header)
            shards.erase(taking.page)
            return taking

    def commit(self, taking: Taking, crc: int) -> None:
        """The payload is complete and has this checksum: from here on the backup is offered."""
        shards.commit(taking.page, taking.header, crc)

    @contextlib.contextmanager
    def open(self, expected: Expected) -> Iterator[Shard]:
        """Read a backup; it is not overwritten meanwhile. Raises ShardMissing or ShardBad."""
        directory = rank_shm(self._root, expected.rank)
        with self._lock:
            index = _find(directory, expected)
            slot = (expected.rank, index)
            self._read[slot] = self._read.get(slot, 0) + 1
        try:
            path = slots.slot_path(directory, index)
            yield shards.open_shard(self._maps.map(path), expected, str(path))
        finally:
            with self._lock:
                self._read[slot] -= 1

    def drop(self, header: Header) -> None:
        """Offer this very backup no more: it turned out to be bad."""
        with self._lock:
            slots.drop(self._root, header)

    def drop_newer(self, step: Step) -> None:
        """A restart goes back to `step`: newer backups belong to an abandoned future."""
        with self._lock:
            for copy in self.inventory():
                if copy.step > step:
                    slots.drop_newer(self._root, copy.rank, step)

    def keep_only(self, step: Step) -> None:
        """The job has another size from now on: of the former one only this step is of use."""
        with self._lock:
            for rank in slots.ranks_in(self._root):
                slots.forget_but(self._root, rank, step)
            self._forget_maps()

    def forget_others(self, world_size: int, safe: Step) -> None:
        """Give back what was kept when the job had another size, once all of this one is safe."""
        with self._lock:
            for rank in slots.ranks_in(self._root):
                held = slots.headers_in(rank_shm(self._root, rank)).values()
                if held and all(h.world_size != world_size and h.step < safe for h in held):
                    slots.forget_but(self._root, rank, None)
                    self._forget_maps()

    def _forget_maps(self) -> None:
        """Files are gone: nothing may be written to what is still mapped of them."""
        self._segments.clear()
        self._maps = slots.Maps()

    def _segment(self, rank: Rank, index: int) -> Segment:
        segment = self._segments.get((rank, index))
        if segment is None:
            path = slots.slot_path(rank_shm(self._root, rank), index)
            segment = self._segments[rank, index] = Segment(path)
        return segment


def _copies_in(directory: Path) -> Iterator[Copy]:
    for index, header in slots.headers_in(directory).items():
        path = slots.slot_path(directory, index)
        expected = Expected(step=header.step, rank=header.rank)
        try:
            shard = shards.open_shard(slots.map_private(path), expected, str(path))
            head = slices.head_of(shard.payload)
        except ShardBad:
            continue  # being overwritten, or damaged: worth nothing
        yield Copy(
            rank=header.rank,
            step=header.step,
            generation=header.generation,
            replicas=spans_of(slices.sharing(head)) if head is not None else (),
        )


_ADVICE = "enlarge it, or keep no copies in the memory of peers (--no-backup)"


def _find(directory: Path, expected: Expected) -> int:
    for index, header in slots.headers_in(directory).items():
        try:
            shards.check_header(header, expected, str(directory))
        except ShardBad:
            continue
        return index
    raise ShardMissing(
        f"no backup of rank {expected.rank}, step {expected.step}, generation"
        f" {expected.generation} is kept here"
    )
