"""Promises of the index: every story can be told, and losing the index costs nothing."""

from __future__ import annotations

import os
import sqlite3
import tempfile
import threading
from pathlib import Path

import msgspec
import pytest

from everstep.actions import (
    CollectStacks,
    GiveVerdict,
    HoldVersion,
    JudgeStacks,
    RefuseUpdate,
    ReturnMachine,
    SendStacks,
    TestMachine,
    TryVersion,
)
from everstep.events import (
    JobSubmitted,
    MachineLost,
    MachineTested,
    StepBackedUp,
    StopRequested,
    TimerFired,
    UpdateRequested,
    VersionTried,
)
from everstep.journal import Index, JournalCorrupt, StoryLine, UnknownId, replay
from everstep.journal.index import BATCH, STORY_MAX, Part
from everstep.journal.records import HEADER
from everstep.looks import Fingerprint, LookResult
from everstep.model import CodeSpec, CodeVersion, Generation, MachineId, Step, VersionId
from everstep.sightings import StacksSent, StacksTaken
from tests.journal.support import SPEC, Run, fill, joined, open_journal

NOBODY = 65534


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A job in which a rank was killed and then a machine was lost."""
    run = Run(open_journal(tmp_path))
    run.start()
    run.train(5)
    run.kill_a_rank()
    run.tell(MachineLost(machine=MachineId("m1"), witness="its keeper is gone"))
    run.tell(joined("m2"))
    return run


def names(lines: list[StoryLine]) -> list[str]:
    return [line.name for line in lines]


def test_the_story_of_a_start_order_goes_back_to_the_dead_rank(run: Run, tmp_path: Path) -> None:
    started = next(
        line
        for line in Index(tmp_path).story("incident-1")
        if line.name == "StartRanks" and line.fields["machine"] == "m1"
    )
    story = Index(tmp_path).story(started.id)
    assert names(story) == [
        "RankExited",
        "OpenIncident",
        "BeginGeneration",
        "StopRanks",
        "RanksStopped",
        "StartRanks",
        "RanksStarted",
    ]
    for line, led_to_it in zip(story[1:], story, strict=False):
        assert line.cause == led_to_it.id
    assert story[0].cause == ""
    assert story[0].fields["exit"] == {"code": None, "signal": 9}
    assert story[5].why.startswith("step 5 is the newest step")


def test_the_story_of_an_incident_is_all_that_happened_while_it_was_open(
    run: Run, tmp_path: Path
) -> None:
    story = Index(tmp_path).story("incident-1")
    told = names(story)
    assert told[:3] == ["RankExited", "OpenIncident", "BeginGeneration"]
    assert told.count("RanksStopped") == told.count("StartRanks") == 2
    assert told[-2:] == ["StepProgress", "CloseIncident"]
    assert [line.time for line in story] == sorted(line.time for line in story)
    assert all(line.why for line in story if line.part is Part.ACTION)


def test_the_story_of_an_open_incident_is_told_up_to_now(run: Run, tmp_path: Path) -> None:
    story = Index(tmp_path).story("incident-2")
    assert names(story)[:2] == ["MachineLost", "OpenIncident"]
    assert "CloseIncident" not in names(story)
    assert story[-1].fields["machine"] == "m2"


def test_why_a_machine_was_evicted_is_one_question(run: Run, tmp_path: Path) -> None:
    story = Index(tmp_path).story("m1")
    assert names(story) == ["MachineLost", "OpenIncident", "EvictMachine"]
    assert story[1].cause == story[0].id


def test_of_a_machine_that_was_not_evicted_the_newest_decision_is_told(
    run: Run, tmp_path: Path
) -> None:
    assert Index(tmp_path).story("m0")[-1].fields["machine"] == "m0"


def test_the_story_of_an_event_ends_with_what_it_led_to(run: Run, tmp_path: Path) -> None:
    index = Index(tmp_path)
    lost = index.story("m1")[0]
    story = index.story(lost.id)
    assert story[0] == lost
    assert {"OpenIncident", "EvictMachine"} <= set(names(story))


def test_an_incident_is_told_to_its_end_although_a_rung_was_taken(tmp_path: Path) -> None:
    run = Run(open_journal(tmp_path))
    run.start()
    run.train(5)
    run.kill_a_rank(proven=False)
    told = names(Index(tmp_path).story("incident-1"))
    assert "TakeRung" in told
    assert told[-1] == "RanksStarted"
    assert "CloseIncident" not in told


def test_copies_that_are_made_meanwhile_are_no_part_of_an_incident(
    run: Run, tmp_path: Path
) -> None:
    """Nor is who gets which code, or the tests of machines that went before."""
    run.record(
        StepBackedUp(machine=MachineId("m0"), action="1.0", step=Step(3)),
        HoldVersion(
            id="7.0",
            cause="7",
            why="so",
            machine=MachineId("m0"),
            version=VersionId("ab"),
            within_s=1.0,
        ),
    )
    told = names(Index(tmp_path).story("incident-2"))
    assert "StepBackedUp" not in told
    assert "HoldVersion" not in told


def test_a_look_of_a_whole_job_is_two_lines_however_many_machines_it_asked(
    run: Run, tmp_path: Path
) -> None:
    """One that asks all of them, and what it meant; texts that travel are routine."""
    now = str(run.journal.next_seq)
    orders = [
        CollectStacks(
            id=f"{now}.{number}",
            cause=now,
            why="no step for 14 s",
            machine=MachineId(f"n{number}"),
            generation=Generation(3),
            look=1,
            within_s=30.0,
        )
        for number in range(2 * STORY_MAX)
    ]
    run.record(TimerFired(), *orders)
    taken = StacksTaken(
        generation=Generation(3),
        look=1,
        actions=tuple(order.id for order in orders),
        machines=tuple(order.machine for order in orders),
    )
    now = str(run.journal.next_seq)
    send = SendStacks(
        id=f"{now}.0",
        cause=now,
        why="unknown",
        machine=MachineId("n0"),
        look=1,
        stacks=(Fingerprint("ab"),),
    )
    run.record(taken, send)
    sent = StacksSent(machine=MachineId("n0"), action=send.id, look=1, stacks=())
    judge = JudgeStacks(
        id=f"{int(now) + 1}.0",
        cause=str(int(now) + 1),
        why="n7 holds all others",
        look=1,
        result=LookResult.MACHINES,
        machines=(MachineId("n7"),),
    )
    run.record(sent, judge)
    story = Index(tmp_path).story("incident-2")
    asked = [line for line in story if line.name == "CollectStacks"]
    assert len(asked) == 1
    assert asked[0].fields["machines_in_all"] == 2 * STORY_MAX
    assert names(story)[-5:] == [
        "CollectStacks",
        "StacksTaken",
        "SendStacks",
        "StacksSent",
        "JudgeStacks",
    ]
    assert [line.cause for line in story[-4:]] == [asked[0].id, now, send.id, judge.cause]


def test_what_became_of_an_evicted_machine_belongs_to_its_story(run: Run, tmp_path: Path) -> None:
    mine, now = MachineId("m1"), str(run.journal.next_seq)
    test = TestMachine(
        id=f"{now}.0", cause=now, why="evicted", machine=mine, attempt=1, within_s=1.0
    )
    other = msgspec.structs.replace(test, id=f"{now}.1", why="another", machine=MachineId("m0"))
    run.record(TimerFired(), test, other)
    tested = MachineTested(machine=mine, action=test.id, passed=True, why="all checks passed")
    now = str(run.journal.next_seq)
    run.record(
        tested,
        GiveVerdict(id=f"{now}.0", cause=now, why="passed", machine=mine, guilty=False),
        ReturnMachine(id=f"{now}.1", cause=now, why="innocent", machine=mine),
    )
    story = Index(tmp_path).story("m1")
    assert names(story)[:3] == ["MachineLost", "OpenIncident", "EvictMachine"]
    assert names(story)[-4:] == ["TestMachine", "MachineTested", "GiveVerdict", "ReturnMachine"]
    assert "another" not in [line.why for line in story]


@pytest.mark.parametrize("ref", ["v2", "cdcdcd", "cd" * 32])
def test_the_story_of_a_version_is_who_sent_it_and_what_became_of_it(
    tmp_path: Path, ref: str
) -> None:
    """Also if it is asked for by the beginning of its id. Another version is another story."""
    versions = [VersionId(letters * 32) for letters in ("ab", "cd", "ef")]
    run = Run(open_journal(tmp_path))
    first = msgspec.structs.replace(SPEC, code=CodeSpec(version=versions[0], roots=("/x",)))
    run.record(JobSubmitted(spec=first))
    for version in versions[1:]:
        code = CodeVersion(version=version, source="/x on h")
        run.record(UpdateRequested(code=code, by="anna"))
    try_it = TryVersion(
        id="4.0", cause="2", why="new", machine=MachineId("m0"), version=versions[1], within_s=1.0
    )
    hold = HoldVersion(
        id="4.1", cause="2", why="new", machine=MachineId("m0"), version=versions[1], within_s=1.0
    )
    run.record(TimerFired(), try_it, hold)
    tried = VersionTried(
        machine=MachineId("m0"), action="4.0", version=versions[1], problem="ImportError"
    )
    run.record(tried, RefuseUpdate(id="5.0", cause="2", why="no import", version=versions[1]))
    story = Index(tmp_path).story(ref)
    assert names(story) == [
        "UpdateRequested",
        "TimerFired",
        "TryVersion",
        "VersionTried",
        "RefuseUpdate",
    ]
    assert names(Index(tmp_path).story("v1")) == ["JobSubmitted"]
    assert names(Index(tmp_path).story("v3")) == ["UpdateRequested"]
    with pytest.raises(UnknownId):
        Index(tmp_path).story("v4")


@pytest.mark.parametrize("ref", ["", "0", "99999", "4.7", "m9", "incident-9", "²", "'; DROP"])
def test_an_unknown_id_is_a_question_of_the_user(run: Run, tmp_path: Path, ref: str) -> None:
    with pytest.raises(UnknownId, match="Nothing in the journal is called"):
        Index(tmp_path).story(ref)


def test_new_records_are_in_the_next_answer(run: Run, tmp_path: Path) -> None:
    index = Index(tmp_path)
    index.story("m1")
    seq = run.tell(StopRequested(by="me"))
    assert names(index.story(str(seq)))[0] == "StopRequested"


def test_a_long_story_has_an_end(tmp_path: Path) -> None:
    run = Run(open_journal(tmp_path))
    run.start()
    run.tell(MachineLost(machine=MachineId("m1"), witness="its keeper is gone"))
    for number in range(STORY_MAX):
        run.tell(joined(f"n{number}"))
    assert len(Index(tmp_path).story("incident-1")) == STORY_MAX


# --- losing it -----------------------------------------------------------------------------------


def test_a_deleted_index_is_built_again(run: Run, tmp_path: Path) -> None:
    before = Index(tmp_path).story("incident-1")
    (tmp_path / "index.sqlite").unlink()
    assert Index(tmp_path).story("incident-1") == before


@pytest.mark.parametrize(
    "content", [b"", b"garbage" * 1000, b"SQLite format 3\x00" + b"\xff" * 9000]
)
def test_a_damaged_index_is_built_again(run: Run, tmp_path: Path, content: bytes) -> None:
    before = Index(tmp_path).story("incident-1")
    (tmp_path / "index.sqlite").write_bytes(content)
    assert Index(tmp_path).story("incident-1") == before


def test_an_index_damaged_while_it_is_open_is_built_again(run: Run, tmp_path: Path) -> None:
    index = Index(tmp_path)
    before = index.story("incident-1")
    with sqlite3.connect(tmp_path / "index.sqlite") as other:
        other.execute("DROP TABLE actions")
    other.close()
    fill(run.journal, 1)
    run.tell(StopRequested(by="me"))
    assert index.story("incident-1") == before


def test_an_index_of_another_layout_is_built_again(run: Run, tmp_path: Path) -> None:
    before = Index(tmp_path).story("incident-1")
    with sqlite3.connect(tmp_path / "index.sqlite") as other:
        other.execute("UPDATE filled SET layout = -1")
        other.execute("DELETE FROM actions")
    other.close()
    assert Index(tmp_path).story("incident-1") == before


def test_the_index_of_a_journal_that_lost_its_end_is_built_again(run: Run, tmp_path: Path) -> None:
    """A power failure may take whole records that the index has; others take their numbers."""
    index = Index(tmp_path)
    size = (tmp_path / "records").stat().st_size
    run.tell(StopRequested(by="one"))
    index.catch_up()
    index.close()
    os.truncate(tmp_path / "records", size)
    journal = open_journal(tmp_path)
    seq = Run(journal, replay(journal).core).tell(StopRequested(by="other"))
    assert Index(tmp_path).story(str(seq))[0].fields["by"] == "other"


def test_many_fill_one_index_at_once(run: Run, tmp_path: Path) -> None:
    fill(run.journal, 3 * BATCH)
    run.tell(StopRequested(by="me"))
    seq = str(run.journal.next_seq - 1)
    found: list[list[str]] = []

    def ask() -> None:
        index = Index(tmp_path)
        found.append(names(index.story(seq)))
        index.close()

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(told[0] == "StopRequested" for told in found)


def test_without_the_right_to_write_the_index_is_in_memory(run: Run, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "records").write_bytes((tmp_path / "records").read_bytes())
        directory.chmod(0o555)
        root = os.geteuid() == 0
        if root:  # root may write anywhere
            os.seteuid(NOBODY)
        try:
            index = Index(directory)
            assert names(index.story("m1")) == ["MachineLost", "OpenIncident", "EvictMachine"]
            index.close()
        finally:
            if root:
                os.seteuid(0)
        assert [path.name for path in directory.iterdir()] == ["records"]


def test_damage_that_a_story_comes_upon_is_named(run: Run, tmp_path: Path) -> None:
    index = Index(tmp_path)
    index.catch_up()
    records = bytearray((tmp_path / "records").read_bytes())
    records[HEADER.size + 30] ^= 0xFF
    (tmp_path / "records").write_bytes(bytes(records))
    with pytest.raises(JournalCorrupt, match="damaged at byte 0"):
        index.story("1")
