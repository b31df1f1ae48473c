"""The one writer of a journal: append, sync, snapshot. Who calls it acts only after `append`.

    DIRECTORY/records        see records.py
              snapshot       the core's state after some record, so that replay is short
              torn-OFFSET    what was cut off the end of `records`
              term-N         see terms.py
              index.sqlite   see index.py

Every append looks for a higher term and writes under the file's lock, and so does the first look of
a new writer: a controller that was fenced while it slept cannot slip a record in behind it. (File
systems without locks have only the look; then readers notice what does not belong there.)
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from everstep.actions import ControllerAction
from everstep.events import ControllerEvent
from everstep.journal import records
from everstep.journal.records import Entry, Fenced, JournalUnwritable, Origin, Record
from everstep.journal.snapshots import (
    SNAPSHOT,
    Position,
    Received,
    Snapshot,
    load_snapshot,
    read_on,
    save_snapshot,
)
from everstep.journal.terms import (
    newest_term,
    owner_of,
    sync_directory,
    unwritable,
    write_synced,
)
from everstep.model import Seconds, Term

SNAPSHOT_EVERY = 5000
"""Records between two snapshots: about a tenth of a second of replay."""
LOCK_ATTEMPTS = 100
LOCK_PAUSE_S = 0.1
"""A writer holds the lock for one append, so 10 s mean that it is stopped or the disk is."""


class Journal:
    """An open journal with the right to append, held until another controller takes a term."""

    def __init__(
        self,
        directory: Path,
        term: Term,
        *,
        version: str,
        sleep: Callable[[Seconds], object] = time.sleep,
    ) -> None:
        """Open for writing under `term` and cut off a torn end; `notices` then says so.

        Raises Fenced, JournalCorrupt, JournalUnwritable.
        """
        self.directory = directory
        self.path = directory / "records"
        self.term = term
        self.version = version
        self.notices: list[str] = []
        """Sentences for people about what was found at the start."""
        self.snapshot: Snapshot | None = None
        """The newest one, as found at the start."""
        self._failed = ""
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                sync_directory(directory)
                with self._alone(sleep):
                    self._take_over()
            except BaseException:
                os.close(self._fd)
                raise
        except OSError as problem:
            raise unwritable(self.path, problem) from problem

    @property
    def next_seq(self) -> int:
        """Journal number of the record that comes next."""
        return self._position.seq + 1

    @property
    def last_time(self) -> Seconds:
        """Time of the newest record: the controller's clock must not go below it."""
        return self._position.time

    @property
    def received(self) -> Received:
        """What of each agent's session is in the journal. A copy."""
        return dict(self._position.received)

    @property
    def snapshot_due(self) -> bool:
        """Whether enough records came since the last snapshot."""
        return self._position.seq - self._snapshot_seq >= SNAPSHOT_EVERY

    def append(
        self,
        event: ControllerEvent,
        at: Seconds,
        *,
        origin: Origin | None = None,
        actions: Sequence[ControllerAction] = (),
    ) -> int:
        """Write one record and return its number: it survives the process, not yet the machine.

        Raises Fenced; JournalUnwritable, after which nothing of it is in the file and the same
        call may be made again.
        """
        record = Record(
            seq=self.next_seq,
            time=at,
            term=self.term,
            version=self.version,
            origin=origin,
            event=event,
            actions=tuple(actions),
        )
        data = records.encode(record)
        with self._alone(None):
            end = self._write(data)
        self._position.after(Entry(end - len(data), end, record))
        return record.seq

    def sync(self) -> None:
        """Everything appended so far survives a power failure when this returns.

        Raises Fenced; JournalUnwritable if the disk failed; then only a new Journal helps.
        """
        self._refuse_if_failed()
        self._refuse_if_fenced()
        try:
            os.fsync(self._fd)
        except OSError as problem:
            # After a failed fsync the kernel may drop the pages and call the next one a success.
            self._failed = str(unwritable(self.path, problem))
            raise unwritable(self.path, problem) from problem

    def write_snapshot(self, state: bytes) -> None:
        """Keep the core's state after the newest record. Raises as `sync`; training goes on."""
        self.sync()
        at = self._position
        self._snapshot_seq = at.seq  # also if it fails: the next try is not at the next record
        try:
            save_snapshot(self.directory, at, state)
        except OSError as problem:
            raise unwritable(self.directory / SNAPSHOT, problem) from problem

    def close(self) -> None:
        """Give up the file; appends are not synced by this."""
        os.close(self._fd)
        self._failed = f"The journal {self.path} is closed."

    # --- start -------------------------------------------------------------------------------

    def _take_over(self) -> None:
        """Find the end of the records and cut off what is torn there."""
        self.snapshot, notice = load_snapshot(self.directory)
        self.notices += [notice] if notice else []
        self._position = Position.of(self.snapshot)
        self._snapshot_seq = self._position.seq
        reader = read_on(self.directory, self._position)
        for entry in reader:
            self._position.after(entry)
        if reader.torn:
            self._cut(reader.end, reader.torn)

    def _cut(self, end: int, torn: int) -> None:
        kept = self.directory / f"torn-{end}"
        try:
            write_synced(kept, os.pread(self._fd, torn, end))
            fate = f"moved to {kept}"
        except OSError:  # a full disk must not keep a job from going on
            fate = "dropped"
        os.ftruncate(self._fd, end)
        os.fsync(self._fd)
        self.notices.append(
            f"The last record of the journal {self.path} is not complete, since its writer was cut "
            f"off: its {torn} bytes were {fate}, and the job goes on from record {self.next_seq}."
        )

    # --- writing -----------------------------------------------------------------------------

    def _write(self, data: bytes) -> int:
        """Append all of it or nothing; the offset of the new end."""
        start = os.lseek(self._fd, 0, os.SEEK_END)
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as problem:
            try:
                os.ftruncate(self._fd, start)
            except OSError:  # a torn end stays, which the next writer cuts off; not this one
                self._failed = str(unwritable(self.path, problem))
            raise unwritable(self.path, problem) from problem
        return start + len(data)

    @contextmanager
    def _alone(self, sleep: Callable[[Seconds], object] | None) -> Iterator[None]:
        """Hold the file's lock and the newest term. Without `sleep` the lock is not waited for."""
        self._refuse_if_failed()
        self._lock(sleep)
        try:
            self._refuse_if_fenced()
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _lock(self, sleep: Callable[[Seconds], object] | None) -> None:
        for _ in range(LOCK_ATTEMPTS):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._refuse_if_fenced()
            except OSError as problem:
                if problem.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
                return
            else:
                return
            if sleep is not None:
                sleep(LOCK_PAUSE_S)
        raise JournalUnwritable(
            f"Another process holds the lock of the journal {self.path}: end the other controller "
            "of this job, or wait until its disk answers again."
        )

    def _refuse_if_fenced(self) -> None:
        newest = newest_term(self.directory)
        if newest > self.term:
            by = owner_of(self.directory, newest)
            raise Fenced(
                f"Term {newest} of this job has begun{f' ({by})' if by else ''}; this controller "
                f"is of term {self.term} and stops. Nothing is to be done: the other one goes on."
            )

    def _refuse_if_failed(self) -> None:
        if self._failed:
            raise JournalUnwritable(self._failed)
