"""Promises of replay: the state after a restart is the state before it, byte for byte."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from everstep.actions import RequestMachines
from everstep.events import MachineSilent, TimerFired
from everstep.journal import JournalDivergence, replay, replay_directory
from everstep.model import MachineId
from tests.journal.support import VERSION, Run, open_journal


def test_an_empty_journal_is_an_empty_state(tmp_path: Path) -> None:
    replayed = replay(open_journal(tmp_path))
    assert replayed.core.state.seq == 0
    assert (replayed.last_time, replayed.next_seq, replayed.received) == (0.0, 1, {})


@pytest.mark.parametrize("snapshot_after", [None, "start", "incident"])
def test_replay_rebuilds_the_exact_state(tmp_path: Path, snapshot_after: str | None) -> None:
    run = Run(open_journal(tmp_path))
    run.start()
    if snapshot_after == "start":
        run.journal.write_snapshot(run.core.snapshot())
    run.kill_a_rank()
    if snapshot_after == "incident":
        run.journal.write_snapshot(run.core.snapshot())
    run.tell(MachineSilent(machine=MachineId("m0"), agent="a"))
    journal = open_journal(tmp_path)
    replayed = replay(journal)
    assert replayed.core.snapshot() == run.core.snapshot()
    assert (replayed.last_time, replayed.next_seq) == (run.now, run.state.seq + 1)
    assert replayed.received == {(MachineId("m0"), "a"): 1, (MachineId("m1"), "a"): 1}
    assert replayed.differences == []


def test_a_replayed_core_goes_on_as_the_first_one_would_have(tmp_path: Path) -> None:
    run = Run(open_journal(tmp_path))
    run.start()
    other = Run(open_journal(tmp_path), replay_directory(tmp_path, version=VERSION).core)
    before = run.core.handle(TimerFired(), run.now + 1)
    assert other.core.handle(TimerFired(), run.now + 1) == before
    other.core = replay_directory(tmp_path, version=VERSION).core
    other.kill_a_rank()
    assert [incident.outcome for incident in other.state.incidents] != [""]


def test_a_snapshot_of_unreadable_layout_is_done_without(tmp_path: Path) -> None:
    run = Run(open_journal(tmp_path))
    run.start()
    run.journal.write_snapshot(msgspec.msgpack.encode({"of": "another version"}))
    run.train(7)
    assert replay(open_journal(tmp_path)).core.snapshot() == run.core.snapshot()


def test_the_same_version_must_decide_the_same(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    Run(journal).start()
    seq = journal.append(TimerFired(), 99.0, actions=[_odd(journal.next_seq)])
    with pytest.raises(
        JournalDivergence, match=rf"Record {seq} .* Recorded: RequestMachines; now: n"
    ):
        replay(open_journal(tmp_path))


def test_what_another_version_decided_is_taken_as_a_fact_and_listed(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, version="0.0.9")
    run = Run(journal)
    run.start()
    seq = journal.append(TimerFired(), 99.0, actions=[_odd(journal.next_seq)])
    replayed = replay(open_journal(tmp_path))
    (difference,) = replayed.differences
    assert difference.seq == seq
    assert [type(action).__name__ for action in difference.recorded] == ["RequestMachines"]
    assert difference.decided == ()


def _odd(seq: int) -> RequestMachines:
    return RequestMachines(id=f"{seq}.0", cause=str(seq), why="nobody would decide this", count=9)
