"""Steps that real ranks do again: their losses are compared, bit for bit, and that is said once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from everstep.actions import StartRanks
from everstep.agent.comparing import ATTACH_WITHIN_S, Comparing
from everstep.events import MachineJoined
from everstep.model import Generation, MachineId, NodeRank, Rank, Step
from everstep.sightings import BadNumber, LossesCompared
from everstep.trainer.heartbeat import Heartbeat
from everstep.trainer.recall import Recall, losses
from tests.agent.fake_controller import FakeController
from tests.agent.support import Job, wait_for

LAST = Step(8)
DONE = 14

TRAINS = """
    import os, pathlib, random, sys, time
    import everstep
    run = everstep.attach()
    random.seed(int(os.environ["RANK"]))
    for step in run.steps():
        loss = random.random()
        {changed}
        run.report(loss=loss)
        if step == 5:
            {waits}
        if step == 15:
            while True:
                time.sleep(1)
"""
UNATTACHED = """
    import os, pathlib, time
    pathlib.Path("runs-" + os.environ["RANK"]).touch()
    while True:
        time.sleep(1)
"""
WAITS = 'while not pathlib.Path("go").exists(): time.sleep(0.01)'


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, FakeController]]:
    job = Job(tmp_path_factory.mktemp("comparing"), f"c{os.getpid()}")
    job.describe(["train.py"])
    controller = FakeController(job.paths)
    job.start("agent", "launcher")
    controller.get(MachineJoined)
    yield job, controller
    job.stop()
    controller.stop()


def train(
    job: tuple[Job, FakeController],
    *,
    changed: str = "pass",
    waits: str = "pass",
    script: str = TRAINS,
) -> Generation:
    """Start ranks that are to do all steps again."""
    machine, controller = job
    machine.script("train.py", script.format(changed=changed, waits=waits))
    generation = machine.next_generation()
    controller.start_ranks(generation, compare_through=LAST)
    return generation


def compared(job: tuple[Job, FakeController], generation: Generation) -> LossesCompared:
    said: LossesCompared = job[1].get(LossesCompared, lambda each: each.generation == generation)
    assert (said.machine, said.first, said.last) == ("m0", 0, LAST)
    return said


@pytest.mark.torch
def test_the_same_code_comes_to_the_same_bits_and_other_code_says_where_it_does_not(
    job: tuple[Job, FakeController],
) -> None:
    for known in job[0].shm.glob("losses-*"):  # of another test
        known.unlink()
    told_before = len(job[1].all(LossesCompared))
    unattached = train(job, script=UNATTACHED)
    wait_for("the script to run", lambda: len(list(job[0].work.glob("runs-*"))) == 2)
    said = compared(job, unattached)
    assert (said.compared, said.differs, said.before) == (0, None, None)
    first = train(job)
    assert compared(job, first).compared == 0, "nothing was done before"
    _done(job, first)
    second = train(job)
    said = compared(job, second)
    assert (said.compared, said.differs) == (18, None)
    _done(job, second)
    changed = "loss += (step >= 4 and os.environ['RANK'] == '1') * 2 ** -52"
    said = compared(job, train(job, changed=changed))
    assert (said.compared, said.differs) == (18, BadNumber(rank=Rank(1), step=Step(4)))
    assert said.before is not None
    assert said.after == said.before + 2**-52
    assert len(job[1].all(LossesCompared)) == told_before + 4, "once each"


@pytest.mark.torch
def test_an_agent_that_takes_over_says_it(job: tuple[Job, FakeController]) -> None:
    machine = job[0]
    _done(job, train(job))
    generation = train(job, waits=WAITS)
    former = machine.pid("agent")
    os.kill(former, signal.SIGKILL)
    machine.pid("agent", other_than=former)
    (machine.work / "go").touch()
    assert compared(job, generation).compared == 18


def _done(job: tuple[Job, FakeController], generation: Generation) -> None:
    """Until every rank has done more than is compared: the next one finds all of it."""
    shm = job[0].shm

    def look() -> bool:
        found = [losses(shm, rank, 2, [DONE]).get(DONE) for rank in (0, 1)]
        return all(loss is not None and loss.generation == generation for loss in found)

    wait_for(f"step {DONE} of both ranks", look)


# --- without processes ---------------------------------------------------------------------------


def beat(rank: int, step: int, generation: int = 2) -> Heartbeat:
    return Heartbeat(
        generation=generation, rank=rank, pid=1, start_ticks=1, step=step, attached=True
    )


def write(shm: Path, rank: int, generation: int, values: dict[int, float]) -> None:
    ring = Recall(shm, rank, 2, generation)
    for step, value in values.items():
        ring.differs(step, value, exact=False)
    ring.close()


@pytest.fixture
def comparing(tmp_path: Path) -> Comparing:
    """Both ranks are to do again what they did."""
    for rank in (0, 1):
        write(tmp_path, rank, 1, {step: 1.0 / (step + 1) for step in range(12)})
    comparing = Comparing(tmp_path, MachineId("m0"))
    comparing.begin(again(), [Rank(0), Rank(1)], 2)
    return comparing


def again(restore: int = 3, through: int = 6) -> StartRanks:
    return StartRanks(
        id="9.0",
        cause="9",
        why="a test",
        machine=MachineId("m0"),
        generation=Generation(2),
        node_rank=NodeRank(0),
        master_addr="a",
        master_port=1,
        restore=Step(restore),
        restore_generation=Generation(1),
        restarts=1,
        compare_through=Step(through),
    )


def test_it_waits_for_every_rank_and_for_losses_that_come_late(
    comparing: Comparing, tmp_path: Path
) -> None:
    def look(*steps: int) -> LossesCompared | None:
        return comparing.look(
            Generation(2), [beat(rank, step) for rank, step in enumerate(steps)], 1e9
        )

    write(tmp_path, 0, 2, {4: 1 / 5, 5: 1 / 6, 6: 1 / 7})
    write(tmp_path, 1, 2, {4: 1 / 5, 5: 1 / 6})
    assert look(6) is None, "one rank has not begun"
    assert look(6, 5) is None
    assert look(6, 6) is None, "the loss of its last step is still on its way"
    assert look(6, 7) is None
    said = look(7, 8)
    assert said is not None, "it will not come"
    assert (said.first, said.last, said.compared, said.differs) == (4, 6, 5, None)
    assert look(9, 9) is None, "once"


def test_a_script_that_never_attaches_is_not_waited_for_without_end(comparing: Comparing) -> None:
    beats = [replace(beat(rank, -1), attached=False) for rank in (0, 1)]
    assert comparing.look(Generation(2), beats, ATTACH_WITHIN_S) is None
    one = [beats[0], beat(1, -1)]
    assert comparing.look(Generation(2), one, ATTACH_WITHIN_S + 1) is None, "it compiles"
    said = comparing.look(Generation(2), beats, ATTACH_WITHIN_S + 1)
    assert said is not None
    assert (said.compared, said.differs) == (0, None)
    assert comparing.look(Generation(2), beats, ATTACH_WITHIN_S + 2) is None, "once"


def test_the_first_step_that_differs_is_named_with_its_lowest_rank(
    comparing: Comparing, tmp_path: Path
) -> None:
    write(tmp_path, 0, 2, {4: 1 / 5, 5: 0.5, 6: 0.5})
    write(tmp_path, 1, 2, {4: 1 / 5, 5: 0.25, 6: 1 / 7})
    said = comparing.look(Generation(2), [beat(0, 6), beat(1, 6)], 9.0)
    assert said is not None
    assert said.differs == BadNumber(rank=Rank(0), step=Step(5))
    assert (said.before, said.after, said.compared) == (1 / 6, 0.5, 6)


def test_ranks_of_another_generation_are_not_compared(comparing: Comparing, tmp_path: Path) -> None:
    assert comparing.look(Generation(3), [beat(0, 9, 3), beat(1, 9, 3)], 9.0) is None
    comparing.begin(again(restore=6), [Rank(0), Rank(1)], 2)
    assert comparing.look(Generation(2), [beat(0, 9), beat(1, 9)], 9.0) is None, (
        "nothing is done again"
    )
    assert not (tmp_path / "comparing").exists()


def test_a_file_that_is_none_is_no_comparison(tmp_path: Path) -> None:
    (tmp_path / "comparing").write_bytes(b"garbage")
    assert Comparing(tmp_path, MachineId("m0")).look(Generation(2), [beat(0, 9)], 9.0) is None
