"""The simulated controller's journal: the records of the real one, in memory, with a running hash.

It keeps the promises of everstep.journal: an append is whole or absent, a fenced writer cannot
append, what was not synced may be lost when the host fails (and only then).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from everstep.actions import ControllerAction
from everstep.core.controller import ControllerCore
from everstep.core.must import must
from everstep.events import ControllerEvent
from everstep.journal.records import Fenced, Origin, Record
from everstep.model import MachineId, Seconds, Term

VERSION = "sim"
Received = dict[tuple[MachineId, str], int]


class Ledger:
    """What all controllers of one run share: the file, so to speak."""

    def __init__(self) -> None:
        self.term = Term(0)
        """The highest that was taken."""
        self.hash = hashlib.blake2b(digest_size=8)
        self._records: list[bytes] = []
        self._synced = 0
        self._snapshot: tuple[int, bytes] | None = None
        self._decoder = msgspec.msgpack.Decoder(Record)
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def records(self) -> list[Record]:
        """All of them, decoded."""
        return [self._decoder.decode(data) for data in self._records]

    def take_term(self) -> Term:
        self.term = Term(self.term + 1)
        return self.term

    def add(self, record: Record) -> None:
        data = self._encoder.encode(record)
        self._records.append(data)
        self.hash.update(data)

    def sync(self) -> None:
        self._synced = len(self._records)

    def keep_snapshot(self, state: bytes) -> None:
        self.sync()
        self._snapshot = (len(self._records), state)

    def lose_unsynced(self) -> int:
        """The host failed: how many records are gone."""
        lost = len(self._records) - self._synced
        del self._records[self._synced :]
        self.hash.update(b"power failure")
        return lost

    def replay(self) -> tuple[ControllerCore, Received, Seconds]:
        """The state that the records say, from the snapshot on."""
        start, state = self._snapshot or (0, b"")
        core = ControllerCore.from_snapshot(state) if state else ControllerCore()
        received: Received = {}
        time: Seconds = 0.0
        for number, record in enumerate(self.records):
            time = record.time
            if record.origin is not None:
                key = (record.origin.machine, record.origin.agent)
                received[key] = max(received.get(key, 0), record.origin.seq)
            if number >= start:
                difference = core.adopt(record.event, record.time, record.actions)
                must(difference is None, f"replay decides differently: {difference}")
        return core, received, time


class MemoryJournal:
    """One controller's right to append to the ledger."""

    def __init__(self, ledger: Ledger, snapshot_every: int) -> None:
        self.term = ledger.take_term()
        self._ledger = ledger
        self._snapshot_every = snapshot_every
        self._since_snapshot = 0

    @property
    def snapshot_due(self) -> bool:
        return self._since_snapshot >= self._snapshot_every

    def append(
        self,
        event: ControllerEvent,
        at: Seconds,
        *,
        origin: Origin | None,
        actions: Sequence[ControllerAction],
    ) -> None:
        """Raises Fenced."""
        self._refuse_if_fenced()
        self._ledger.add(
            Record(
                seq=len(self._ledger._records) + 1,  # noqa: SLF001 -- two halves of one thing
                time=at,
                term=self.term,
                version=VERSION,
                origin=origin,
                event=event,
                actions=tuple(actions),
            )
        )
        self._since_snapshot += 1

    def sync(self) -> None:
        """Raises Fenced."""
        self._refuse_if_fenced()
        self._ledger.sync()

    def write_snapshot(self, state: bytes) -> None:
        """Raises Fenced."""
        self._refuse_if_fenced()
        self._ledger.keep_snapshot(state)
        self._since_snapshot = 0

    def _refuse_if_fenced(self) -> None:
        if self._ledger.term > self.term:
            raise Fenced(f"term {self._ledger.term} has begun")
