"""SQLite beside the journal: which record answers a question, so that `why` is one query.

It holds nothing of its own: it is filled from the records whenever it is asked, and built anew if
it is missing, damaged, of another layout or of another journal. Deleting it costs time only. Any
number of processes may use it, also while a controller appends; without the right to write into
the directory it is built in memory.

Ids: an event is its journal number ("412"), an action is "412.0". An action's cause is one of both;
an event that answers an action names it. That makes a chain from any fact back to the first one.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from everstep.actions import (
    BackUpStep,
    CollectStacks,
    ControllerAction,
    HoldVersion,
    PersistStep,
    PublishStep,
    SendStacks,
    TestMachine,
)
from everstep.events import (
    BackupFailed,
    ControllerEvent,
    JobSubmitted,
    MachineReady,
    MachineTested,
    PersistFailed,
    StepBackedUp,
    StepPersisted,
    StepProgress,
    StepPublished,
    TimerFired,
    UpdateRequested,
    VersionHeld,
)
from everstep.journal.records import HEADER, Entry, Reader, read_at
from everstep.journal.snapshots import RECORDS
from everstep.model import Seconds, UserError, Value
from everstep.sightings import ActivitySeen, StacksSent, StacksTaken

LAYOUT = 3
"""Raised by one whenever the tables change: an index of another layout is built anew."""
STORY_MAX = 400
"""Lines of one story. A start of 10,000 machines is one event and 10,000 orders."""
BATCH = 2000
"""Records between two commits while filling: bounds memory and what a kill costs."""

_TABLES = (
    "CREATE TABLE filled (layout INTEGER, seq INTEGER, offset INTEGER, last INTEGER, header BLOB)",
    "INSERT INTO filled VALUES (0, 0, 0, 0, x'')",
    "CREATE TABLE events (seq INTEGER PRIMARY KEY, offset INTEGER, answers TEXT, routine INTEGER)",
    "CREATE INDEX events_answers ON events (answers)",
    """CREATE TABLE actions (id TEXT PRIMARY KEY, seq INTEGER, number INTEGER, name TEXT,
       cause TEXT, machine TEXT, incident TEXT, version TEXT, routine INTEGER)""",
    "CREATE INDEX actions_seq ON actions (seq)",
    "CREATE INDEX actions_machine ON actions (machine)",
    "CREATE INDEX actions_incident ON actions (incident)",
    "CREATE INDEX actions_version ON actions (version)",
    "CREATE TABLE versions (seq INTEGER, version TEXT, number INTEGER)",
)
_ROUTINE = (
    StepProgress,
    TimerFired,
    PersistStep,
    PublishStep,
    StepPersisted,
    PersistFailed,
    StepPublished,
    BackUpStep,
    StepBackedUp,
    BackupFailed,
    HoldVersion,
    VersionHeld,
    TestMachine,
    MachineTested,
    MachineReady,
    ActivitySeen,
    SendStacks,
    StacksSent,
    StacksTaken,
)
"""What goes on during an incident as at any time: told only where it led to something."""
_ONE_FOR_ALL = (CollectStacks,)
"""Ordered from all machines at once, and told as one line: of a record the first stands for all."""


class UnknownId(UserError):
    """The question names something that the journal does not know."""


class Part(StrEnum):
    """What a line of a story is."""

    EVENT = "event"
    ACTION = "action"


class StoryLine(Value, frozen=True, kw_only=True):
    """One fact or one decision of a story."""

    id: str
    part: Part
    time: Seconds
    name: str
    """RankExited, EvictMachine..."""
    cause: str
    """Id of what led to it; empty for a fact that nobody asked for."""
    why: str
    """An action's reason; empty for an event."""
    fields: dict[str, Any]
    """All fields of the event or action, as plain values."""


class Index:
    """The index of the journal in one directory."""

    def __init__(self, directory: Path) -> None:
        self._records = directory / RECORDS
        self._path = directory / "index.sqlite"
        self._db = self._open()

    def close(self) -> None:
        """Close the database; the index can not be asked any more."""
        self._db.close()

    def catch_up(self) -> None:
        """Take in what was appended since. Called by every question; a controller calls it now and
        then, so that no question waits long. Raises JournalCorrupt, OSError.
        """
        for anew in (self._on_disk_anew, self._in_memory):
            try:
                self._fill()
            except sqlite3.Error:
                self._db.close()
                self._db = anew()
            else:
                return
        self._fill()

    def story(self, ref: str) -> list[StoryLine]:
        """How it came to what `ref` names, oldest first: at most STORY_MAX lines.

        An action or event: the chain of causes that led to it, and what it led to at once. An
        incident: its facts and decisions from the first symptom to its end. A machine: its
        newest eviction and what became of it, else the newest decision about it. A code version
        (v3, or its id): who sent it, its trials, and when it was put in place or refused. Raises
        UnknownId, JournalCorrupt, OSError.
        """
        self.catch_up()
        ids = self._with_causes(self._named(ref))
        seqs = sorted(int(one) for one in ids if "." not in one)
        return [line for seq in seqs for line in self._lines(seq, ids)][:STORY_MAX]

    # --- stories -----------------------------------------------------------------------------

    def _named(self, ref: str) -> list[str]:
        """Ids of the events and actions that the story of `ref` begins with."""
        window = self._all(
            "SELECT MIN(seq), MAX(CASE name WHEN 'CloseIncident' THEN seq END) FROM actions "
            "WHERE incident = ?",
            ref,
        )
        if window[0][0] is not None:
            return self._window(*window[0])
        found = self._version(ref) or self._machine(ref)
        if not found:
            found = self._all("SELECT id FROM actions WHERE id = ?", ref)
        if found:
            told = [one for (one,) in found]
            answers = [
                self._all("SELECT CAST(seq AS TEXT) FROM events WHERE answers = ?", one)
                for one in told
            ]
            return [*told, *(seq for each in answers for (seq,) in each)]
        if ref.isascii() and ref.isdigit() and self._offset(int(ref)) is not None:
            led_to = self._all("SELECT id FROM actions WHERE seq = ?", int(ref))
            return [ref, *(one for (one,) in led_to)]
        raise UnknownId(
            f'Nothing in the journal is called "{ref}": give an action (say 412.0), an event '
            "(412), an incident, a machine or a code version (v2); `everstep incidents` lists the"
            " incidents."
        )

    def _machine(self, name: str) -> list[tuple[str]]:
        """Its newest eviction, and what was decided of that since; else the newest decision."""
        evicted = self._all(
            "SELECT seq FROM actions WHERE machine = ? AND name = 'EvictMachine' "
            "ORDER BY seq DESC LIMIT 1",
            name,
        )
        if not evicted:
            return self._all(
                "SELECT id FROM actions WHERE machine = ? ORDER BY seq DESC LIMIT 1", name
            )
        return self._all(
            "SELECT id FROM actions WHERE machine = ? AND seq >= ? "
            "AND name IN ('EvictMachine', 'TestMachine', 'GiveVerdict', 'ReturnMachine') "
            "ORDER BY seq",
            name,
            evicted[0][0],
        )

    def _version(self, name: str) -> list[tuple[str]]:
        """Its requests, and the decisions about it but for who was told to get it."""
        return self._all(
            "WITH named AS (SELECT seq, version FROM versions WHERE version = ?1 "
            "OR 'v' || number = ?1 OR (LENGTH(?1) >= 6 AND SUBSTR(version, 1, LENGTH(?1)) = ?1)) "
            "SELECT CAST(seq AS TEXT) FROM named UNION ALL "
            "SELECT id FROM actions WHERE version IN (SELECT version FROM named) "
            "AND name IN ('TryVersion', 'SwitchCode', 'RefuseUpdate')",
            name,
        )

    def _window(self, first: int, last: int | None) -> list[str]:
        """All of an incident but routine: only one incident is open at a time."""
        ids = self._all(
            "SELECT id FROM actions WHERE seq BETWEEN ?1 AND ?2 AND NOT routine UNION ALL "
            "SELECT CAST(seq AS TEXT) FROM events WHERE seq BETWEEN ?1 AND ?2 AND NOT routine "
            "LIMIT ?3",
            first,
            1 << 62 if last is None else last,
            2 * STORY_MAX,
        )
        return [one for (one,) in ids]

    def _with_causes(self, ids: list[str]) -> dict[str, None]:
        """These, and what led to each of them, back to facts that nobody asked for."""
        found: dict[str, None] = {}
        while ids:
            one = ids.pop()
            if one in found:
                continue
            found[one] = None
            if "." in one:
                # An action is told together with the event that it was decided at.
                causes = self._all("SELECT cause FROM actions WHERE id = ?", one)
                ids.append(one.partition(".")[0])
            else:
                causes = self._all("SELECT answers FROM events WHERE seq = ?", int(one))
            ids += [cause for (cause,) in causes if cause]
        return found

    def _lines(self, seq: int, ids: dict[str, None]) -> Iterable[StoryLine]:
        offset = self._offset(seq)
        if offset is None:
            return
        record = read_at(self._records, offset)
        yield StoryLine(
            id=str(seq),
            part=Part.EVENT,
            time=record.time,
            name=type(record.event).__name__,
            cause=_answers(record.event),
            why="",
            fields=_fields(record.event),
        )
        counts = Counter(type(one).__name__ for one in record.actions)
        for action in record.actions:
            if action.id in ids:
                count = counts[type(action).__name__] if isinstance(action, _ONE_FOR_ALL) else 0
                yield StoryLine(
                    id=action.id,
                    part=Part.ACTION,
                    time=record.time,
                    name=type(action).__name__,
                    cause=action.cause,
                    why=action.why,
                    fields=_fields(action) | ({"machines_in_all": count} if count else {}),
                )

    def _offset(self, seq: int) -> int | None:
        found = self._all("SELECT offset FROM events WHERE seq = ?", seq)
        return found[0][0] if found else None

    def _all(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return self._db.execute(query, values).fetchall()

    # --- filling -----------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        try:
            return self._prepared(_connect(self._path))
        except sqlite3.Error:
            return self._on_disk_anew()

    def _on_disk_anew(self) -> sqlite3.Connection:
        """An empty index instead of one that is of no use."""
        for name in (self._path.name, f"{self._path.name}-journal"):
            with suppress(OSError):
                self._path.with_name(name).unlink(missing_ok=True)
        try:
            return self._prepared(_connect(self._path))
        except sqlite3.Error:
            return self._in_memory()

    def _in_memory(self) -> sqlite3.Connection:
        return self._prepared(_connect(":memory:"))

    def _prepared(self, db: sqlite3.Connection) -> sqlite3.Connection:
        """With tables, made in one transaction since others may be opening it too.

        Raises sqlite3.Error, and has closed it, if it is not of this layout or of another journal.
        """
        try:
            with db:
                db.execute("BEGIN IMMEDIATE")
                if not db.execute("SELECT 1 FROM sqlite_master").fetchone():
                    for statement in _TABLES:
                        db.execute(statement)
                    db.execute("UPDATE filled SET layout = ?", (LAYOUT,))
                found = db.execute("SELECT layout, seq, last, header FROM filled").fetchone()
                if found[0] != LAYOUT or (found[1] and self._mark(found[2]) != found[2:]):
                    raise sqlite3.DatabaseError("an index of something else")
        except sqlite3.Error:
            db.close()
            raise
        return db

    def _fill(self) -> None:
        while self._fill_batch() == BATCH:
            pass

    def _fill_batch(self) -> int:
        """Take in the next records in one transaction; how many there were."""
        with self._db as db:
            # Immediately, since another process may be filling too: it waits here, then goes on
            # from where this one ended.
            db.execute("BEGIN IMMEDIATE")
            seq, offset = db.execute("SELECT seq, offset FROM filled").fetchone()
            batch = list(islice(Reader(self._records, offset=offset, last_seq=seq), BATCH))
            for entry in batch:
                _insert(db, entry)
            if batch:
                db.execute(
                    "UPDATE filled SET seq = ?, offset = ?, last = ?, header = ?",
                    (batch[-1].record.seq, batch[-1].end, *self._mark(batch[-1].offset)),
                )
        return len(batch)

    def _mark(self, offset: int) -> tuple[int, bytes]:
        """What tells a record from another one at the same place: its length and checksum."""
        with self._records.open("rb") as file:
            file.seek(offset)
            return offset, file.read(HEADER.size)


def _connect(place: Path | str) -> sqlite3.Connection:
    db = sqlite3.connect(place, isolation_level=None)
    db.execute("PRAGMA synchronous = OFF")  # losing the index costs time only
    return db


def _insert(db: sqlite3.Connection, entry: Entry) -> None:
    record = entry.record
    if isinstance(record.event, StepProgress | TimerFired) and not record.actions:
        return  # nine of ten records; nothing was decided and nothing was asked
    answers = _answers(record.event)
    routine = isinstance(record.event, _ROUTINE)
    db.execute(
        "INSERT INTO events VALUES (?, ?, ?, ?)", (record.seq, entry.offset, answers, routine)
    )
    db.executemany(
        "INSERT INTO actions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            _row(record.seq, number, action, seen=seen)
            for number, (action, seen) in enumerate(_with_seen(record.actions))
        ],
    )
    version = _version_of(record.event)
    if version:
        db.execute(
            "INSERT INTO versions SELECT ?1, ?2, COALESCE("
            "(SELECT number FROM versions WHERE version = ?2), "
            "(SELECT COUNT(DISTINCT version) + 1 FROM versions))",
            (record.seq, version),
        )


def _version_of(event: ControllerEvent) -> str:
    """The code version that came with this event; people call them v1, v2... in this order."""
    if isinstance(event, JobSubmitted):
        return event.spec.code.version
    return event.code.version if isinstance(event, UpdateRequested) else ""


def _answers(event: ControllerEvent) -> str:
    """The order that a fact answers; of those of many machines the first."""
    many = getattr(event, "actions", ())
    return many[0] if many else getattr(event, "action", "")


def _with_seen(actions: Iterable[ControllerAction]) -> Iterator[tuple[ControllerAction, bool]]:
    """Each with whether one before it stands for it."""
    told: set[type[ControllerAction]] = set()
    for action in actions:
        yield action, isinstance(action, _ONE_FOR_ALL) and type(action) in told
        told.add(type(action))


def _row(seq: int, number: int, action: ControllerAction, *, seen: bool) -> tuple[object, ...]:
    return (
        action.id,
        seq,
        number,
        type(action).__name__,
        action.cause,
        getattr(action, "machine", None),
        getattr(action, "incident", None),
        getattr(action, "version", None),
        seen or isinstance(action, _ROUTINE),
    )


def _fields(value: Value) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(value)
    plain.pop("type", None)
    return plain
