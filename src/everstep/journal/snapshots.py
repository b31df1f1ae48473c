"""The core's state after some record, kept beside the records so that a replay stays short.

Written by writer.py, read by it and by replay.py. A snapshot is only ever a short cut: if it is
damaged or of no use, everything is read from the first record on.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from everstep.journal.records import Entry, JournalCorrupt, Origin, Reader, frame, unframe
from everstep.journal.terms import sync_directory, write_synced
from everstep.model import MachineId, Seconds, Value

RECORDS = "records"
SNAPSHOT = "snapshot"

Received = dict[tuple[MachineId, str], int]
"""(machine, agent session) -> newest message number whose event is in the journal."""


class Snapshot(Value, frozen=True, kw_only=True):
    """Content of the snapshot file."""

    seq: int
    """Of the last record that it includes."""
    offset: int
    """Where that record ends."""
    time: Seconds
    received: tuple[Origin, ...]
    state: bytes


class Position(msgspec.Struct, kw_only=True):
    """What is known at some record's end."""

    seq: int = 0
    offset: int = 0
    time: Seconds = 0.0
    received: Received = {}

    @classmethod
    def of(cls, snapshot: Snapshot | None) -> Position:
        """Where the records begin that a snapshot does not include."""
        if snapshot is None:
            return cls()
        return cls(
            seq=snapshot.seq,
            offset=snapshot.offset,
            time=snapshot.time,
            received={(o.machine, o.agent): o.seq for o in snapshot.received},
        )

    def after(self, entry: Entry) -> None:
        record = entry.record
        self.seq, self.offset, self.time = record.seq, entry.end, record.time
        if record.origin is not None:
            key = (record.origin.machine, record.origin.agent)
            self.received[key] = max(self.received.get(key, 0), record.origin.seq)


def read_on(directory: Path, position: Position) -> Reader:
    """The entries from this position on."""
    return Reader(directory / RECORDS, offset=position.offset, last_seq=position.seq)


def save_snapshot(directory: Path, at: Position, state: bytes) -> None:
    """Replace the snapshot; the records up to `at` must be synced. Raises OSError."""
    snapshot = Snapshot(
        seq=at.seq,
        offset=at.offset,
        time=at.time,
        received=tuple(
            Origin(machine=machine, agent=agent, seq=seq)
            for (machine, agent), seq in at.received.items()
        ),
        state=state,
    )
    beside = directory / f".{SNAPSHOT}"
    try:
        write_synced(beside, frame(msgspec.msgpack.encode(snapshot)))
        beside.replace(directory / SNAPSHOT)
        sync_directory(directory)
    finally:
        beside.unlink(missing_ok=True)


def load_snapshot(directory: Path) -> tuple[Snapshot | None, str]:
    """The newest snapshot, and a sentence for people if there is one that is of no use.

    Raises JournalCorrupt if the journal is shorter than it was then, OSError.
    """
    path = directory / SNAPSHOT
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None, ""
    try:
        snapshot = msgspec.msgpack.decode(unframe(data, 0) or b"", type=Snapshot)
    except msgspec.MsgspecError:
        return None, f"The snapshot {path} is damaged and not used: the whole journal is read."
    size = (directory / RECORDS).stat().st_size
    if snapshot.offset > size:
        raise JournalCorrupt(
            f"The journal {directory / RECORDS} has {size} bytes, but had {snapshot.offset} when "
            "its snapshot was made: its end is lost. Restore it from a copy, or move the journal "
            "away and submit the job again: its checkpoints are not in it.",
            size,
        )
    return snapshot, ""
