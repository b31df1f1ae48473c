"""The append-only record of events and decisions, and its index.

    records.py   what one record is, how a file of them is read, and the errors of the journal
    terms.py     who may write: every start of a controller takes the next term
    writer.py    Journal: append, sync, snapshot
    snapshots.py what keeps a replay short
    replay.py    the journal through the same core again: the state after a restart
    index.py     SQLite beside it, for `everstep why`; can be deleted at any time

Used by controller/ (writes), by the command line and pages (read), and, its records only, by sim/.
It decides nothing and never looks into events beyond their names and ids.
"""

from everstep.journal.index import Index, StoryLine, UnknownId
from everstep.journal.records import (
    Fenced,
    JournalCorrupt,
    JournalDivergence,
    JournalError,
    JournalUnwritable,
    Origin,
    Record,
)
from everstep.journal.replay import Replayed, replay, replay_directory
from everstep.journal.terms import newest_term, take_term
from everstep.journal.writer import SNAPSHOT_EVERY, Journal

__all__ = [
    "SNAPSHOT_EVERY",
    "Fenced",
    "Index",
    "Journal",
    "JournalCorrupt",
    "JournalDivergence",
    "JournalError",
    "JournalUnwritable",
    "Origin",
    "Record",
    "Replayed",
    "StoryLine",
    "UnknownId",
    "newest_term",
    "replay",
    "replay_directory",
    "take_term",
]
