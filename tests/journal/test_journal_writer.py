"""Promises of the journal's writer: what was appended is there, whatever happens afterwards."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from everstep.events import StopRequested, TimerFired
from everstep.journal import (
    Fenced,
    Journal,
    JournalCorrupt,
    JournalError,
    JournalUnwritable,
    Origin,
    newest_term,
    take_term,
    terms,
    writer,
)
from everstep.journal.records import HEADER, PAYLOAD_BYTES_MAX, Reader, frame
from everstep.model import MachineId, Term
from tests.journal.support import VERSION, fill, open_journal, records_of

NOBODY = 65534


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    origin = Origin(machine=MachineId("m1"), agent="a1", seq=7)
    assert journal.append(TimerFired(), 1.5) == 1
    assert journal.append(StopRequested(by="me"), 2.5, origin=origin) == 2
    again = open_journal(tmp_path)
    first, second = records_of(tmp_path)
    assert (first.seq, first.time, first.term, first.version) == (1, 1.5, Term(1), VERSION)
    assert (second.event, second.origin) == (StopRequested(by="me"), origin)
    assert (again.next_seq, again.last_time, again.notices) == (3, 2.5, [])
    assert again.received == {(MachineId("m1"), "a1"): 7}


def test_a_record_cut_anywhere_is_cut_off_and_nothing_else(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    fill(journal, 3)
    committed = (tmp_path / "records").stat().st_size
    journal.append(StopRequested(by="someone"), 9.0)
    whole = (tmp_path / "records").read_bytes()
    for size in range(committed + 1, len(whole)):
        (tmp_path / "records").write_bytes(whole[:size])
        cut = open_journal(tmp_path)
        assert cut.next_seq == 4
        assert (tmp_path / "records").read_bytes() == whole[:committed]
        assert (tmp_path / f"torn-{committed}").read_bytes() == whole[committed:size]
        (notice,) = cut.notices
        assert f"its {size - committed} bytes were moved" in notice
        assert cut.append(StopRequested(by="someone"), 9.0) == 4
        cut.close()


def test_a_journal_cut_in_its_first_record_starts_anew(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    fill(journal, 1)
    whole = (tmp_path / "records").read_bytes()
    for size in range(1, len(whole)):
        (tmp_path / "records").write_bytes(whole[:size])
        cut = open_journal(tmp_path)
        assert cut.next_seq == 1
        cut.close()


def test_zeros_at_the_end_are_a_torn_end(tmp_path: Path) -> None:
    """What some file systems leave of an unfinished write after a power failure."""
    fill(open_journal(tmp_path), 2)
    with (tmp_path / "records").open("ab") as file:
        file.write(bytes(5000))
    assert open_journal(tmp_path).next_seq == 3


def test_a_flipped_byte_in_the_middle_is_an_error_that_names_the_offset(tmp_path: Path) -> None:
    fill(open_journal(tmp_path), 6)
    whole = (tmp_path / "records").read_bytes()
    borders = [entry.offset for entry in Reader(tmp_path / "records")]
    damaged, following = borders[2], borders[3]
    for at in range(damaged, following):
        changed = bytearray(whole)
        changed[at] ^= 0xFF
        (tmp_path / "records").write_bytes(bytes(changed))
        with pytest.raises(JournalCorrupt, match=f"byte {damaged}, in record 3") as caught:
            open_journal(tmp_path)
        assert caught.value.offset == damaged
        assert f"from byte {following} on" in str(caught.value)
        assert (tmp_path / "records").read_bytes() == bytes(changed)


def test_a_missing_record_is_an_error(tmp_path: Path) -> None:
    fill(open_journal(tmp_path), 4)
    whole = (tmp_path / "records").read_bytes()
    borders = [entry.offset for entry in Reader(tmp_path / "records")]
    (tmp_path / "records").write_bytes(whole[: borders[1]] + whole[borders[2] :])
    with pytest.raises(JournalCorrupt, match="record 3 of term 1 after record 1"):
        open_journal(tmp_path)


def test_a_record_of_a_newer_everstep_is_an_error_that_says_so(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.append(TimerFired(), 1.0)
    data = (tmp_path / "records").read_bytes()
    payload = data[HEADER.size :].replace(b"TimerFired", b"TimerFares")
    (tmp_path / "records").write_bytes(frame(payload))
    with pytest.raises(JournalCorrupt, match="use the version that wrote it, or a newer one"):
        open_journal(tmp_path)


def test_an_absurdly_large_record_is_refused(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    with pytest.raises(JournalError, match="this is a defect of everstep"):
        journal.append(StopRequested(by="x" * PAYLOAD_BYTES_MAX), 1.0)
    assert journal.append(TimerFired(), 1.0) == 1


# --- snapshots -----------------------------------------------------------------------------------


def test_a_snapshot_saves_reading_what_is_before_it(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    origin = Origin(machine=MachineId("m1"), agent="a1", seq=7)
    journal.append(TimerFired(), 1.0, origin=origin)
    journal.write_snapshot(b"state")
    fill(journal, 2)
    records = bytearray((tmp_path / "records").read_bytes())
    records[HEADER.size] ^= 0xFF
    (tmp_path / "records").write_bytes(bytes(records))
    again = open_journal(tmp_path)
    assert (again.next_seq, again.last_time) == (4, 3.0)
    assert again.received == {(MachineId("m1"), "a1"): 7}


def test_a_snapshot_is_due_after_many_records(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    fill(journal, writer.SNAPSHOT_EVERY - 1)
    assert not journal.snapshot_due
    fill(journal, 1)
    assert journal.snapshot_due
    journal.write_snapshot(b"state")
    assert not journal.snapshot_due
    assert not open_journal(tmp_path).snapshot_due


def test_a_damaged_snapshot_is_not_used_and_people_are_told(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    fill(journal, 3)
    journal.write_snapshot(b"state")
    whole = (tmp_path / "snapshot").read_bytes()
    for damaged in (whole[:-1], whole[:5], b"", b"\x00" + whole[1:]):
        (tmp_path / "snapshot").write_bytes(damaged)
        again = open_journal(tmp_path)
        assert again.next_seq == 4
        (notice,) = again.notices
        assert "is damaged and not used" in notice
        again.close()


def test_a_journal_shorter_than_its_snapshot_is_an_error(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    fill(journal, 3)
    journal.write_snapshot(b"state")
    (tmp_path / "records").write_bytes((tmp_path / "records").read_bytes()[:-1])
    with pytest.raises(JournalCorrupt, match="its end is lost"):
        open_journal(tmp_path)


# --- one writer ----------------------------------------------------------------------------------


def test_terms_only_grow_and_old_ones_do_not_pile_up(tmp_path: Path) -> None:
    assert newest_term(tmp_path / "absent") == 0
    taken = [take_term(tmp_path, f"pid {n}") for n in range(1, 21)]
    assert taken == list(range(1, 21))
    assert newest_term(tmp_path) == 20
    assert terms.owner_of(tmp_path, Term(20)) == "pid 20"
    assert len(list(tmp_path.iterdir())) == terms.KEPT


def test_a_term_is_taken_on_a_full_disk_too(tmp_path: Path) -> None:
    """A controller that is started again and again meanwhile must not fill it with terms either."""
    with _file_size_limit(0):
        for _ in range(2 * terms.KEPT):
            take_term(tmp_path, "pid 1")
    assert newest_term(tmp_path) == 2 * terms.KEPT
    assert len(list(tmp_path.iterdir())) == terms.KEPT


def test_a_term_is_taken_once(tmp_path: Path) -> None:
    """Two starts at once: the slower one finds the name taken and takes the next."""
    take_term(tmp_path)
    assert not terms._create(tmp_path, Term(1), "")
    assert take_term(tmp_path) == 2


def test_a_second_writer_fences_the_first(tmp_path: Path) -> None:
    first = open_journal(tmp_path)
    first.append(TimerFired(), 1.0)
    term = take_term(tmp_path, "pid 4711 on here")
    for refused in (lambda: first.append(TimerFired(), 2.0), first.sync):
        with pytest.raises(Fenced, match=r"Term 2 of this job has begun \(pid 4711 on here\)"):
            refused()
    second = Journal(tmp_path, term, version=VERSION)
    assert second.append(TimerFired(), 3.0) == 2
    with pytest.raises(Fenced):
        first.append(TimerFired(), 4.0)
    assert [record.term for record in records_of(tmp_path)] == [1, 2]


def test_a_term_that_is_over_cannot_be_opened(tmp_path: Path) -> None:
    old = take_term(tmp_path)
    take_term(tmp_path)
    with pytest.raises(Fenced):
        Journal(tmp_path, old, version=VERSION)


def test_a_new_writer_waits_for_an_append_that_is_under_way(tmp_path: Path) -> None:
    fill(open_journal(tmp_path), 1)
    waited: list[float] = []
    with (tmp_path / "records").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def wait(seconds: float) -> None:
            waited.append(seconds)
            fcntl.flock(other, fcntl.LOCK_UN)

        journal = Journal(tmp_path, take_term(tmp_path), version=VERSION, sleep=wait)
    assert len(waited) == 1
    assert journal.append(TimerFired(), 2.0) == 2


def test_a_lock_that_stays_held_is_an_error_with_advice(tmp_path: Path) -> None:
    fill(open_journal(tmp_path), 1)
    with (tmp_path / "records").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(JournalUnwritable, match="end the other controller"):
            Journal(tmp_path, take_term(tmp_path), version=VERSION, sleep=lambda _: None)


def test_records_of_two_controllers_at_once_are_noticed(tmp_path: Path) -> None:
    """Where locks do not work, a late record of a fenced writer may slip in: never unnoticed."""
    first = open_journal(tmp_path)
    fill(first, 2)
    second = open_journal(tmp_path)
    late = (tmp_path / "records").read_bytes()[: HEADER.size + 40]
    second.append(TimerFired(), 9.0)
    size = next(entry.end for entry in Reader(tmp_path / "records"))
    with (tmp_path / "records").open("r+b") as file:
        late = file.read(size)
        file.seek(0, os.SEEK_END)
        file.write(late)
    with pytest.raises(JournalCorrupt, match="two controllers wrote to it at once"):
        open_journal(tmp_path)


# --- disks that refuse ---------------------------------------------------------------------------


@contextmanager
def _file_size_limit(size: int) -> Iterator[None]:
    """A disk that is full after this many bytes of a file, for any user."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_loses_nothing_and_the_append_may_be_tried_again(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    fill(journal, 3)
    committed = (tmp_path / "records").read_bytes()
    for room in (0, 1, 9, 30):
        with (
            _file_size_limit(len(committed) + room),
            pytest.raises(JournalUnwritable, match="Free space there") as caught,
        ):
            journal.append(StopRequested(by="someone"), 9.0)
        assert str(tmp_path) in str(caught.value)
        assert (tmp_path / "records").read_bytes() == committed
    assert journal.append(StopRequested(by="someone"), 9.0) == 4
    assert [record.seq for record in records_of(tmp_path)] == [1, 2, 3, 4]


def test_a_snapshot_that_finds_no_room_leaves_the_former_one(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    fill(journal, 3)
    journal.write_snapshot(b"first")
    fill(journal, 1)
    with _file_size_limit(1000), pytest.raises(JournalUnwritable, match="snapshot"):
        journal.write_snapshot(b"x" * 2000)
    assert journal.append(TimerFired(), 9.0) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["records", "snapshot", "term-1"]
    again = open_journal(tmp_path)
    assert again.snapshot is not None
    assert again.snapshot.state == b"first"


def test_a_torn_end_is_cut_off_on_a_full_disk_too(tmp_path: Path) -> None:
    fill(open_journal(tmp_path), 100)
    size = (tmp_path / "records").stat().st_size
    with (tmp_path / "records").open("ab") as file:
        file.write(bytes(2000))
    term = take_term(tmp_path)
    with _file_size_limit(1000):
        journal = Journal(tmp_path, term, version=VERSION)
    assert (tmp_path / "records").stat().st_size == size
    assert "2000 bytes were dropped" in journal.notices[0]


def test_a_directory_that_may_not_be_written_is_one_clear_sentence() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o555)
        root = os.geteuid() == 0
        if root:  # root may write anywhere
            os.seteuid(NOBODY)
        try:
            with pytest.raises(
                JournalUnwritable, match=r"Permission denied\. Free space there, or"
            ):
                take_term(directory)
            with pytest.raises(
                JournalUnwritable, match=r"Permission denied\. Free space there, or"
            ):
                Journal(directory, Term(1), version=VERSION)
        finally:
            if root:
                os.seteuid(0)


def test_a_disk_that_fails_to_sync_ends_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed fsync the next one may succeed without having written anything."""
    journal = open_journal(tmp_path)
    journal.append(TimerFired(), 1.0)

    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(JournalUnwritable, match="Input/output error"):
            journal.sync()
    for refused in (journal.sync, lambda: journal.append(TimerFired(), 2.0)):
        with pytest.raises(JournalUnwritable, match="Input/output error"):
            refused()
    assert open_journal(tmp_path).next_seq == 2


def test_a_closed_journal_says_so(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.close()
    with pytest.raises(JournalUnwritable, match="is closed"):
        journal.append(TimerFired(), 1.0)
