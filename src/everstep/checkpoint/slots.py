"""Slots in shared memory: where each rank's newest shards outlive it.

    SHM/rank-R/slot-0 .. slot-3   one shard each (format.py); slot-4 too in a job with backups
    SHM/rank-R/control            the steps that the agent asked to keep (pins.py)

Three slots rotate. With two, a fast rank overwrites step s-1 while a slow one still copies s, and a
kill then leaves no step that all ranks hold. Beside them lies what is pinned: one step for the disk
tier; with backups two, the machine-safe step and the one that is on its way to the peers (both are
needed until that one is complete everywhere; what goes to disk then is one of the two). All of this
is enumerated in tests/checkpoint/. choose_slot() is the whole rotation, pure.

The rank's copy thread is the only one that writes shards (ShardWriter). The agent of the machine
lists, drops and persists them, dead or alive, and needs no torch for it. Slots are plain
files that were reserved before they are written: a full tmpfs is an OSError here, never a SIGBUS.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from msgspec.structs import replace

from everstep.checkpoint import format as shards
from everstep.checkpoint.budget import room_in
from everstep.checkpoint.format import PAGE, Expected, Header, Shard
from everstep.checkpoint.need import (
    ROTATING,
    SLOTS,
    SLOTS_WITH_BACKUPS,
    Need,
    segment_bytes,
)
from everstep.checkpoint.pages import fault_in
from everstep.checkpoint.pins import Pins, open_control, read_pins
from everstep.model import Copy, EverstepError, Generation, Rank, Step, Value
from everstep.paths import rank_shm


class ShardMissing(EverstepError):
    """The rank has not saved this step (yet)."""


class ShardLost(EverstepError):
    """The rank saved this step and has overwritten it since."""


class SharedMemoryTooSmall(EverstepError):
    """There is no room for the slots, or for the state that grew."""


class Held(Value, frozen=True, kw_only=True, array_like=True):
    """What a slot with a complete shard holds."""

    step: Step
    generation: Generation


class Writer(Value, frozen=True, kw_only=True):
    """Who writes: goes into every header."""

    rank: Rank
    world_size: int
    generation: Generation
    local_ranks: int = 1
    """Ranks on this machine; each needs as much as this one."""
    backups: bool = False
    """Whether the job keeps shards in the memory of peers, and this machine theirs."""

    @property
    def slots(self) -> int:
        """Slots of each rank."""
        return SLOTS_WITH_BACKUPS if self.backups else SLOTS


def choose_slot(slots: Sequence[Held | None], step: Step, pins: Pins) -> int:
    """The slot that the copy of `step` overwrites. None stands for a torn or empty slot.

    First what is worth nothing: torn slots, then copies of an abandoned future (a restart went back
    behind them). Then the oldest. Never a pinned step, as long as three slots are left to rotate.
    """
    pinned = pins.in_force([held.step for held in slots if held], step, len(slots) - ROTATING)

    def worth(index: int) -> tuple[int, int]:
        held = slots[index]
        if held is None:
            return (0, index)
        return (1 if held.step >= step else 2, held.step)

    free = [index for index, held in enumerate(slots) if held is None or held.step not in pinned]
    return min(free, key=worth)


# --- one slot's file -----------------------------------------------------------------------------


def slot_path(directory: Path, index: int) -> Path:
    return directory / f"slot-{index}"


class Segment:
    """The file of one slot, mapped into the process that writes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.whole = memoryview(b"")
        """All bytes; torch views made of it keep the mapping alive after a growth replaced it."""
        self._prefaulted = 0
        self.mappings = 0
        """Grows with every new mapping: whoever cached addresses compares it."""
        if path.exists() and path.stat().st_size >= PAGE:
            self._map(path.stat().st_size)

    @property
    def size(self) -> int:
        return len(self.whole)

    def grow(self, size: int) -> None:
        """Reserve and map at least `size` bytes. Raises OSError if they are not there."""
        if self.size < size:
            self._map(size)

    def prefault(self, most: int) -> bool:
        """Fault up to `most` more bytes in, without the GIL. False when all are."""
        size = min(most, self.size - self._prefaulted)
        if size <= 0:
            return False
        fault_in(self.whole[self._prefaulted : self._prefaulted + size])
        self._prefaulted += size
        return True

    def release(self) -> None:
        """Give the memory back."""
        self.whole = memoryview(b"")
        self._path.unlink(missing_ok=True)

    def _map(self, size: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(self._path, flags, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
            self.whole = memoryview(mmap.mmap(fd, size))
        finally:
            os.close(fd)
        self._prefaulted = 0
        self.mappings += 1


# --- the rank's side -----------------------------------------------------------------------------


class OpenSlot:
    """A slot that is being written: its payload area, until ShardWriter.commit()."""

    def __init__(self, index: int, segment: Segment, header: Header) -> None:
        self.index = index
        self.header = header
        """Without its digest until commit()."""
        self.mappings = segment.mappings
        self.whole = segment.whole
        self.page = segment.whole[:PAGE]
        self.payload = segment.whole[PAGE : PAGE + header.payload_bytes]


class ShardWriter:
    """The one writer of one rank's slots. A new one, after a restart, reuses what it finds."""

    def __init__(self, shm: Path, writer: Writer) -> None:
        self.rank = writer.rank
        self._shm = shm
        self._writer = writer
        self._directory = rank_shm(shm, writer.rank)
        self._control = open_control(self._directory)
        self._segments = [Segment(slot_path(self._directory, n)) for n in range(writer.slots)]
        self._headers = [self._read(segment) for segment in self._segments]
        known = [header.sequence for header in self._headers if header is not None]
        self._sequence = max(known, default=0)

    def reserve(self, payload_bytes: int, backup_bytes: int | None = None) -> Need | None:
        """Make room in all slots or in none; what it takes, None if it was there already.

        `backup_bytes`: what a peer will keep of the payload; None: all. Raises SharedMemoryTooSmall
        with the figure needed.
        """
        if all(segment.size >= PAGE + payload_bytes for segment in self._segments):
            return None
        need = self._need(payload_bytes, backup_bytes)
        self._check_room(need)
        fresh = [segment for segment in self._segments if segment.size == 0]
        try:
            for segment in self._segments:
                segment.grow(segment_bytes(payload_bytes))
        except OSError as error:
            for segment in fresh:
                segment.release()
            raise self._too_small(need, error.strerror or str(error)) from error
        return need

    def prefault(self, most: int) -> bool:
        """Fault in up to `most` bytes of any slot. False when there is nothing left to do."""
        return any(segment.prefault(most) for segment in self._segments)

    def begin(self, step: Step, payload_bytes: int) -> OpenSlot:
        """Void the slot whose turn it is. Raises SharedMemoryTooSmall, and then voids nothing."""
        index = self._choose(step)
        segment = self._segments[index]
        if segment.size < PAGE + payload_bytes:
            self._grow(segment, payload_bytes)
        self._sequence += 1
        header = Header(
            step=step,
            generation=self._writer.generation,
            rank=self._writer.rank,
            world_size=self._writer.world_size,
            sequence=self._sequence,
            payload_bytes=payload_bytes,
            digest=0,
        )
        slot = OpenSlot(index, segment, header)
        self._headers[index] = None
        shards.erase(slot.page)
        return slot

    def commit(self, slot: OpenSlot, digest: int, fetched_crc: int | None = None) -> None:
        """The payload is complete. `fetched_crc`: its checksum, if it came from a peer."""
        slot.header = replace(slot.header, digest=digest)
        shards.commit(slot.page, slot.header, fetched_crc)
        self._headers[slot.index] = slot.header

    def void(self, slot: OpenSlot) -> None:
        """Take a commit back: the copy turned out to be torn."""
        self._headers[slot.index] = None
        shards.erase(slot.page)

    def _choose(self, step: Step) -> int:
        held = [
            None if header is None else Held(step=header.step, generation=header.generation)
            for header in self._headers
        ]
        return choose_slot(held, step, read_pins(self._control))

    def _read(self, segment: Segment) -> Header | None:
        """What an earlier writer left. A truncated shard is worth nothing; that of another size of
        the job may still be read by the rank that goes on with it.
        """
        header = shards.read_header(segment.whole[:PAGE])
        if header is None:
            return None
        return header if PAGE + header.payload_bytes <= segment.size else None

    def _need(self, payload_bytes: int, backup_bytes: int | None = None) -> Need:
        return Need(
            payload_bytes=payload_bytes,
            backup_bytes=payload_bytes if backup_bytes is None else backup_bytes,
            local_ranks=self._writer.local_ranks,
            backups=self._writer.backups,
        )

    def _check_room(self, need: Need) -> None:
        """All local ranks reserve at about the same time: look at the whole machine's need."""
        held = sum(path.stat().st_blocks * 512 for path in self._shm.rglob("rank-*/slot-*"))
        room = room_in(self._shm)
        if need.total_bytes - held > room.free_bytes:
            raise self._too_small(need, str(room))

    def _grow(self, segment: Segment, payload_bytes: int) -> None:
        need = self._need(payload_bytes)
        size = segment_bytes(payload_bytes)
        room = room_in(self._shm)
        if size - segment.size > room.free_bytes:
            raise self._too_small(need, str(room))
        try:
            segment.grow(size)
        except OSError as error:
            raise self._too_small(need, error.strerror or str(error)) from error

    def _too_small(self, need: Need, have: str) -> SharedMemoryTooSmall:
        return SharedMemoryTooSmall(
            f"checkpoints in memory need {need} in {self._shm.parent}, but {have}: {need.advice}"
        )


# --- the agent's side ----------------------------------------------------------------------------


def inventory(shm: Path, ranks: Iterable[Rank]) -> list[Copy]:
    """All complete shards of these ranks in memory, by rank and step. Payloads are not read."""
    return [
        Copy(rank=header.rank, step=header.step, generation=header.generation)
        for rank in ranks
        for header in sorted(headers_in(rank_shm(shm, rank)).values(), key=lambda h: h.step)
        if header.rank == rank
    ]


def drop_newer(shm: Path, rank: Rank, step: Step) -> None:
    """Void the slots of steps after `step`. Only while no process writes this rank's slots."""
    directory = rank_shm(shm, rank)
    for index, header in headers_in(directory).items():
        if header.step > step:
            _void(directory, index)


def ranks_in(shm: Path) -> list[Rank]:
    """Whose slots there are on this machine, whatever its position is now."""
    names = [entry.name.removeprefix("rank-") for entry in shm.glob("rank-*")]
    return sorted(Rank(int(name)) for name in names if name.isdigit())


def make_way(shm: Path, ranks: Collection[Rank], restore: Step) -> None:
    """Before these ranks start from `restore`: what is newer is void, and what others had is gone.

    Of ranks that ran here when the job had another size, only the step that may be restored is
    left: their memory is needed. Only while no process writes any rank's slots.
    """
    for rank in ranks_in(shm):
        drop_newer(shm, rank, restore)
        if rank not in ranks:
            forget_but(shm, rank, restore)


def forget_others(shm: Path, ranks: Collection[Rank], safe: Step) -> None:
    """Give back what ranks left that ran here in another size, once a newer step is safe."""
    for rank in ranks_in(shm):
        held = headers_in(rank_shm(shm, rank)).values()
        if rank not in ranks and all(header.step < safe for header in held):
            forget_but(shm, rank, None)


def forget_but(shm: Path, rank: Rank, step: Step | None) -> None:
    """Give the memory back of all slots of a rank but this step's; None: of all."""
    directory = rank_shm(shm, rank)
    kept = [index for index, header in headers_in(directory).items() if header.step == step]
    if not kept:
        shutil.rmtree(directory, ignore_errors=True)
        return
    for index in range(SLOTS_WITH_BACKUPS):
        if index not in kept:
            slot_path(directory, index).unlink(missing_ok=True)


def drop_step(shm: Path, rank: Rank, step: Step) -> None:
    """Void the slots of this step: a rank found them bad before it trains."""
    directory = rank_shm(shm, rank)
    for index, header in headers_in(directory).items():
        if header.step == step:
            _void(directory, index)


def drop(shm: Path, header: Header) -> None:
    """Void the slot that holds this very shard, which turned out to be bad."""
    directory = rank_shm(shm, header.rank)
    for index, found in headers_in(directory).items():
        if found == header:
            _void(directory, index)


def find(shm: Path, expected: Expected, mapped: Callable[[Path], mmap.mmap] | None = None) -> Shard:
    """Open the slot that holds this step. Raises ShardMissing, ShardLost, or ShardBad.

    `mapped` maps a file for reading; None: as map_private() does.
    """
    directory = rank_shm(shm, expected.rank)
    headers = headers_in(directory)
    matching = [index for index, header in headers.items() if header.step == expected.step]
    if not matching:
        newest = max((header.step for header in headers.values()), default=None)
        what = f"rank {expected.rank} holds no complete copy of step {expected.step} in memory"
        if newest is not None and newest > expected.step:
            raise ShardLost(f"{what} any more: its newest is {newest}")
        raise ShardMissing(f"{what}: its newest is {newest}")
    index = max(matching, key=lambda index: headers[index].sequence)
    path = slot_path(directory, index)
    try:
        return shards.open_shard((mapped or map_private)(path), expected, str(path))
    except shards.ShardBad as error:
        if unchanged(shm, headers[index]):
            raise
        raise ShardLost(f"{path} was overwritten while it was opened") from error


def unchanged(shm: Path, header: Header) -> bool:
    """Whether the shard that was read is still there: then nothing overwrote it meanwhile."""
    return header in headers_in(rank_shm(shm, header.rank)).values()


def remove_all(shm: Path) -> None:
    """Remove all shared memory of one machine: at the end of its job."""
    if shm.exists():
        shutil.rmtree(shm)


def map_private(path: Path) -> mmap.mmap:
    """Map a shard for reading. Pages are writable but private: nobody can harm the shard by it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        if size == 0:
            raise shards.ShardBad(f"{path} is empty")
        return mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)


class Maps:
    """Files that one process reads again and again, mapped once.

    The first look at each page of a fresh mapping costs more than to read it. One thread at a time
    for each file.
    """

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int], mmap.mmap]] = {}

    def map(self, path: Path) -> mmap.mmap:
        """The file as it is now, mapped for reading."""
        stat = path.stat()
        identity = (stat.st_ino, stat.st_size)
        known = self._known.get(path)
        if known is None or known[0] != identity:
            known = self._known[path] = (identity, map_private(path))
        return known[1]


def headers_in(directory: Path) -> dict[int, Header]:
    """The complete shards in one directory of slots, by slot number."""
    found = {}
    for index in range(SLOTS_WITH_BACKUPS):
        try:
            with slot_path(directory, index).open("rb") as file:
                header = shards.read_header(memoryview(file.read(PAGE)))
                whole = os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            continue
        if header is not None and PAGE + header.payload_bytes <= whole:
            found[index] = header
    return found


def _void(directory: Path, index: int) -> None:
    segment = Segment(slot_path(directory, index))
    shards.erase(segment.whole[:PAGE])
