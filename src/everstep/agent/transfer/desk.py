"""What the called end does for its callers: which backup may change what, and which is void.

Behind server.py, one Visit for each connection. A backup that is void, because its generation is
over or a newer transfer of the same rank has come, is ended at once, and in no case does it
overwrite or commit anything after fence() or the newer one's begin() has returned.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from everstep.agent.transfer.channel import Cancel
from everstep.agent.transfer.identity import Identity
from everstep.agent.transfer.messages import Get, Put
from everstep.agent.transfer.talk import CodeGiven, Given, Refused
from everstep.checkpoint import slices, slots
from everstep.checkpoint.format import Expected, Header, Shard, ShardBad
from everstep.checkpoint.kept import Kept, KeptBusy, Taking
from everstep.checkpoint.slots import ShardLost, ShardMissing, SharedMemoryTooSmall
from everstep.code.manifest import CodeBroken, short
from everstep.code.store import CodeStore
from everstep.model import NO_GENERATION, Generation, Rank, Seconds, VersionId

TURN_WITHIN_S: Seconds = 2.0
"""For a transfer that was replaced by a newer one of the same rank to end."""


class Desk:
    """Of one machine. Any thread may use it."""

    def __init__(self, me: Identity, shm: Path, code: CodeStore) -> None:
        self.me = me
        self.code = code
        self.kept = Kept(shm)
        self._shm = shm
        self._lock = threading.Lock()
        self._generation = NO_GENERATION
        self._incoming: dict[Rank, Visit] = {}

    def fence(self, generation: Generation) -> None:
        """From here on, what older generations ordered changes nothing here any more."""
        with self._lock:
            self._generation = max(self._generation, generation)
            void = [v for v in self._incoming.values() if v.generation < self._generation]
        for visit in void:
            visit.cancel.cancel()

    def check(self, put: Put) -> None:
        """Raises Refused if the backup is void."""
        with self._lock:
            self._check(put)

    def begin(self, visit: Visit, put: Put) -> Taking:
        """End an older transfer of this rank's shard and void the slot for the new one."""
        self._take_turn(visit, put.header.rank)
        self.kept.reserve(put.header)
        with self._lock:  # in one go with the look at the generation
            self._check(put)
            return self.kept.begin(put.header, put.safe)

    def commit(self, put: Put, taking: Taking, crc: int) -> None:
        """The shard is whole: offer it from now on. Raises Refused if it is void."""
        with self._lock:
            self._check(put)
            self.kept.commit(taking, crc)
        self.kept.forget_others(put.header.world_size, put.safe)

    @contextlib.contextmanager
    def excerpt(self, expected: Expected, reader: Rank) -> Iterator[Given]:
        """Slices for this rank, from a backup or from what a rank of this machine saved.

        A rank looks at what it saved itself, but nobody else at a backup of which only some bytes
        are sent: it is verified before. Raises ShardMissing, ShardLost or ShardBad.
        """
        with self.open(expected) as (shard, is_backup):
            if is_backup:
                try:
                    shard.verify()
                except ShardBad:
                    self.kept.drop(shard.header)
                    raise
            part = slices.excerpt(shard, reader)
            yield Given(replace(shard.header, payload_bytes=part.nbytes), part.chunks, None)

    @contextlib.contextmanager
    def open(self, expected: Expected) -> Iterator[tuple[Shard, bool]]:
        """A backup, or what a rank of this machine saved itself, and whether it is a backup.

        Raises ShardMissing or ShardLost.
        """
        with contextlib.ExitStack() as stack:
            own, why = self._own(expected)
            if own is not None:
                yield own, False
                return
            try:
                shard = stack.enter_context(self.kept.open(expected))
            except ShardMissing as missing:
                raise ShardMissing(f"{missing}, and {why}") from missing
            yield shard, True

    def _own(self, expected: Expected) -> tuple[Shard | None, str]:
        """First: it is whole, and after a change of the job's size a backup of it may be a part."""
        try:
            return slots.find(self._shm, expected), ""
        except (ShardMissing, ShardLost, ShardBad) as error:
            return None, str(error)

    def left(self, visit: Visit) -> None:
        """Nothing of this visit writes any more."""
        with self._lock:
            for rank in [rank for rank, each in self._incoming.items() if each is visit]:
                del self._incoming[rank]

    def _check(self, put: Put) -> None:
        if put.order_generation < self._generation:
            raise Refused(
                f"generation {put.order_generation} is over, it is at generation {self._generation}"
            )

    def _take_turn(self, visit: Visit, rank: Rank) -> None:
        deadline = time.monotonic() + TURN_WITHIN_S
        while True:
            with self._lock:
                older = self._incoming.get(rank)
                if older is None:
                    self._incoming[rank] = visit
                    return
            older.cancel.cancel()
            if not older.over.wait(max(0.0, deadline - time.monotonic())):
                raise Refused(f"an older transfer of rank {rank}'s shard does not end", again=True)


class Visit:
    """One connection: what its conversation (talk.Host) asks of the machine."""

    def __init__(self, desk: Desk) -> None:
        self.token, self.uid, self.machine = desk.me
        self.cancel = Cancel()
        self.over = threading.Event()
        self.generation = NO_GENERATION
        """That ordered what is being received."""
        self._desk = desk
        self._put: Put | None = None

    def holds(self, put: Put) -> bool:
        self._desk.check(put)
        header = put.header
        if not 0 <= header.rank < header.world_size or header.payload_bytes < 0:
            raise Refused(f"there is no such shard: {header}")
        return self._desk.kept.holds(header)

    def take(self, put: Put) -> Taking:
        self._put, self.generation = put, put.order_generation
        try:
            return self._desk.begin(self, put)
        except KeptBusy as error:
            raise Refused(str(error), again=True) from error
        except SharedMemoryTooSmall as error:
            raise Refused(str(error)) from error

    def store(self, taking: Taking, crc: int) -> None:
        assert self._put is not None, "take() comes first"
        self._desk.commit(self._put, taking, crc)

    @contextlib.contextmanager
    def give(self, get: Get) -> Iterator[Given]:
        expected = Expected(
            step=get.step, rank=get.rank, generation=get.generation, world_size=get.world_size
        )
        try:
            if get.reader is not None:
                with self._desk.excerpt(expected, get.reader) as given:
                    yield given
                return
            with self._desk.open(expected) as (shard, _):
                yield Given(shard.header, [shard.payload], shard.crc)
        except (ShardMissing, ShardLost, ShardBad) as error:
            raise Refused(str(error)) from error

    def give_code(self, version: VersionId) -> CodeGiven:
        store = self._desk.code
        try:
            return CodeGiven(store.size_of_archive(version), _reading(store, version))
        except (CodeBroken, OSError) as error:
            raise Refused(f"it cannot give code version {short(version)}: {error}") from error

    def damaged(self, header: Header) -> None:
        self._desk.kept.drop(header)

    def end(self) -> None:
        """The connection is over: whoever waited for this visit may go on."""
        self._desk.left(self)
        self.over.set()


def _reading(store: CodeStore, version: VersionId) -> Iterator[bytes]:
    try:
        yield from store.chunks(version)
    except (CodeBroken, OSError) as error:
        raise Refused(f"it cannot read code version {short(version)}: {error}") from error
