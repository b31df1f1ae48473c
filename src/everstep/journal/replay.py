"""The journal through the same core again: the state that the last controller left.

Called by a starting controller, and by whoever wants to look at a job without one. Recorded
decisions are facts and are taken as they are; deciding them again is a check. The version that
wrote a record must decide the same, else the core is not deterministic and nothing it says can be
trusted. Another version may decide differently; where it does is listed.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from everstep.core.controller import ControllerCore, Difference
from everstep.journal.records import Entry, JournalDivergence
from everstep.journal.snapshots import Position, Received, load_snapshot, read_on
from everstep.journal.writer import Journal
from everstep.model import Seconds


class Replayed(msgspec.Struct, kw_only=True):
    """What a journal says."""

    core: ControllerCore
    last_time: Seconds
    """Of the newest record, 0 if there is none: the clock must not go below it."""
    received: Received
    next_seq: int
    differences: list[Difference]
    """Where this version would have decided otherwise than an older or newer one did."""


def replay(journal: Journal) -> Replayed:
    """Rebuild the core from an open journal. Raises JournalDivergence, JournalCorrupt, OSError."""
    return replay_directory(journal.directory, version=journal.version)


def replay_directory(directory: Path, *, version: str) -> Replayed:
    """Rebuild the core from a journal that somebody else may be writing; nothing is changed.

    `version` is the caller's own: its decisions must be repeated exactly. Raises as `replay`.
    """
    snapshot, _ = load_snapshot(directory)
    core: ControllerCore | None = None
    if snapshot is not None:
        core = _load(snapshot.state)
    position = Position.of(snapshot if core is not None else None)
    core = core if core is not None else ControllerCore()
    differences = []
    for entry in read_on(directory, position):
        difference = _adopt(core, entry, version)
        if difference is not None:
            differences.append(difference)
        position.after(entry)
    return Replayed(
        core=core,
        last_time=position.time,
        received=position.received,
        next_seq=position.seq + 1,
        differences=differences,
    )


def _load(state: bytes) -> ControllerCore | None:
    """None: the state is of a version whose states this one cannot read; replay does without."""
    try:
        return ControllerCore.from_snapshot(state)
    except msgspec.MsgspecError:
        return None


def _adopt(core: ControllerCore, entry: Entry, version: str) -> Difference | None:
    record = entry.record
    difference = core.adopt(record.event, record.time, record.actions)
    if difference is not None and record.version == version:
        raise JournalDivergence(
            f"Record {record.seq} of the journal (byte {entry.offset}) was decided by this very "
            f"version {version} of everstep, which now decides otherwise. Recorded: "
            f"{_names(difference.recorded)}; now: {_names(difference.decided)}. Please report "
            "this defect with the journal; an older or newer version of everstep may go on."
        )
    return difference


def _names(actions: tuple[object, ...]) -> str:
    return ", ".join(type(action).__name__ for action in actions) or "nothing"
