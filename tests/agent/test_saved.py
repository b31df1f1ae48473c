"""Before ranks are stopped for something planned: what they have finished is saved, or not due."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.agent.saved import Saves, next_save
from everstep.checkpoint.slots import ShardWriter, Writer
from everstep.events import RanksStopped
from everstep.model import Generation, Rank, Step, VersionId
from everstep.paths import SHM_ROOT
from everstep.trainer.heartbeat import Heartbeat
from tests.agent.fake_controller import FakeController
from tests.agent.support import DEADLINE_S, Job, wait_for

GENERATION = Generation(3)


class Ranks:
    """Two that save, as far as their slots tell."""

    def __init__(self, shm: Path) -> None:
        self.running = True
        self.saves = Saves(shm, lambda: self.running)
        self._writers = [
            ShardWriter(shm, Writer(rank=Rank(rank), world_size=2, generation=GENERATION))
            for rank in (0, 1)
        ]

    def save(self, step: int, *ranks: int) -> None:
        for rank in ranks or (0, 1):
            slot = self._writers[rank].begin(Step(step), 10)
            self._writers[rank].commit(slot, digest=0)

    async def caught_up(self, finished: int, within_s: float) -> None:
        beats = [
            Heartbeat(generation=GENERATION, rank=rank, pid=1, start_ticks=1, step=finished)
            for rank in (0, 1)
        ]
        await self.saves.caught_up(beats, within_s)

    def is_waited_for(self, finished: int) -> bool:
        """Whether the time that is given is used up."""
        began = time.monotonic()
        asyncio.run(self.caught_up(finished, 0.1))
        return time.monotonic() - began >= 0.1


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    shm = SHM_ROOT / f"everstep-saved-{os.getpid()}"
    yield Ranks(shm)
    shutil.rmtree(shm)


def test_a_step_that_is_being_saved_is_waited_for(ranks: Ranks) -> None:
    ranks.save(4)
    ranks.save(5)

    async def save_meanwhile() -> None:
        waiting = asyncio.create_task(ranks.caught_up(6, DEADLINE_S))
        await asyncio.sleep(0)
        ranks.save(6, 0)
        done, _ = await asyncio.wait([waiting], timeout=0.1)
        assert not done, "rank 1 has not saved it"
        ranks.save(6, 1)
        await asyncio.wait_for(waiting, DEADLINE_S)

    asyncio.run(save_meanwhile())


def test_what_is_saved_already_or_was_passed_is_not_waited_for(ranks: Ranks) -> None:
    ranks.save(4)
    ranks.save(5)
    ranks.save(6, 0)
    asyncio.run(ranks.caught_up(5, DEADLINE_S))


def test_ranks_that_save_nothing_or_not_every_step_are_not_waited_for(ranks: Ranks) -> None:
    asyncio.run(ranks.caught_up(7, DEADLINE_S))
    ranks.save(10)
    ranks.save(20)
    asyncio.run(ranks.caught_up(29, DEADLINE_S))
    assert ranks.is_waited_for(30)


def test_dead_ranks_save_nothing_more(ranks: Ranks) -> None:
    ranks.save(4)
    ranks.running = False
    asyncio.run(ranks.caught_up(5, DEADLINE_S))


def test_the_next_save_is_as_far_from_the_last_as_that_from_the_one_before() -> None:
    assert next_save([Step(3)]) == 4
    assert next_save([Step(100), Step(101), Step(102)]) == 103
    assert next_save([Step(100), Step(150)]) == 200
    assert next_save([]) > 1 << 60


# --- a real stop ---------------------------------------------------------------------------------

SAVES = """
    import os, pathlib, time
    import everstep
    from everstep.checkpoint.slots import ShardWriter, Writer
    rank = int(os.environ["RANK"])
    who = Writer(rank=rank, world_size=2, generation=1)
    writer = ShardWriter(pathlib.Path({shm!r}), who)
    for step in everstep.attach().steps():
        if step == 6:
            pathlib.Path(f"at-{{rank}}").touch()
            while not pathlib.Path("go").exists():
                time.sleep(0.01)
        if step > 0:
            writer.commit(writer.begin(step - 1, 10), digest=0)
        if step == 6:
            while True:
                time.sleep(1)
"""


@pytest.mark.torch
def test_a_planned_stop_lets_ranks_save_what_they_have_finished(tmp_path: Path) -> None:
    job = Job(tmp_path, f"s{os.getpid()}")
    job.script("train.py", SAVES.format(shm=str(job.shm)))
    job.describe(["train.py"], no_fork=True)
    controller = FakeController(job.paths)
    try:
        job.start("agent", "launcher")
        controller.start_ranks(1)
        wait_for("step 5 to be finished", lambda: len(list(job.work.glob("at-*"))) == 2)
        stop = controller.stop_order(2, saved_within_s=DEADLINE_S)
        controller.order(stop)
        controller.hold(VersionId("ab" * 32))  # once that is answered, the stop is under way
        (job.work / "go").touch()
        stopped = controller.answer_to(stop, RanksStopped)
        newest = {rank: max(c.step for c in stopped.copies if c.rank == rank) for rank in (0, 1)}
        assert newest == {0: 5, 1: 5}
        assert stopped.finished == 5
    finally:
        job.stop()
        controller.stop()
