"""Promises of the agent's part in the disk tier: a step gets to disk whole, or it says why not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from everstep.actions import PersistStep
from everstep.agent import own_disk
from everstep.agent.own_disk import OwnDisk
from everstep.agent.persist import Persisting
from everstep.agent.saved import Saves
from everstep.agent.this_machine import ThisMachine
from everstep.checkpoint import local_disk
from everstep.checkpoint.disk import publish, published, shard_path
from everstep.checkpoint.slots import ShardWriter, Writer
from everstep.events import PersistFailed, StepPersisted
from everstep.model import (
    NO_STEP,
    CheckpointSpec,
    Copy,
    Generation,
    MachineId,
    Published,
    Rank,
    Step,
)
from tests.agent.support import Job

RANKS = [Rank(0), Rank(1)]


class Disk:
    """A machine's shared memory, its ranks as writers without processes, and its agent's part."""

    def __init__(self, root: Path) -> None:
        job = Job(root, f"p{os.getpid()}")
        self.own_disk = root / "nvme"
        spec = job.describe(["train.py"], checkpoint=self._tiers(root))
        self.here = ThisMachine.read(job.machine.setup)
        self.directory = Path(spec.checkpoint.directory)
        self.running = True
        self.persisting = Persisting(
            self.here, Saves(self.here.shm, lambda: self.running), OwnDisk(self.here)
        )
        self._writers = {
            rank: ShardWriter(self.here.shm, Writer(rank=rank, world_size=2, generation=GENERATION))
            for rank in RANKS
        }

    def save(self, step: int, *ranks: Rank) -> None:
        for rank in ranks or RANKS:
            writer = self._writers[rank]
            writer.reserve(100)
            slot = writer.begin(Step(step), 100)
            slot.payload[:] = bytes([step] * 100)
            writer.commit(slot, digest=0)

    def _tiers(self, root: Path) -> CheckpointSpec:
        return CheckpointSpec(
            directory=str(root / "job" / "checkpoints"), local_directory=str(self.own_disk)
        )

    async def persist(
        self, step: int, *, local_disk: bool = False, safe: int = NO_STEP
    ) -> StepPersisted | PersistFailed:
        order = PersistStep(
            id=f"{'l' if local_disk else 'p'}{step}",
            cause="test",
            why="test",
            machine=MachineId("m0"),
            generation=GENERATION,
            step=Step(step),
            local_disk=local_disk,
            safe=Step(safe),
        )
        return await self.persisting.persist(order, RANKS)

    def answer_local(self, step: int, safe: int = NO_STEP) -> StepPersisted | PersistFailed:
        return asyncio.run(self.persist(step, local_disk=True, safe=safe))

    def on_own_disk(self) -> list[int]:
        """Steps that all ranks have there, as the agent lists them."""
        own_disk = OwnDisk(self.here)
        asyncio.run(own_disk.look())
        steps = [[copy.step for copy in own_disk.copies if copy.rank == rank] for rank in RANKS]
        return sorted(set(steps[0]) & set(steps[1]))

    def answer(self, step: int) -> StepPersisted | PersistFailed:
        return asyncio.run(self.persist(step))


GENERATION = Generation(2)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    yield disk
    for path in sorted(disk.here.shm.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    disk.here.shm.rmdir()


def test_saved_shards_get_to_disk_and_can_be_published(disk: Disk) -> None:
    disk.save(5)
    assert disk.answer(5) == StepPersisted(machine=MachineId("m0"), action="p5", step=Step(5))
    publish(disk.directory, Step(5), GENERATION, world_size=2, keep=2)
    assert published(disk.directory) == [Published(step=Step(5), generation=GENERATION)]


def test_a_step_that_is_still_to_come_is_waited_for_and_kept(disk: Disk) -> None:
    """Ordered ahead of time, and then ranks run on: the pin keeps the slot until it is copied."""

    async def order_then_save() -> StepPersisted | PersistFailed:
        answer = asyncio.create_task(disk.persist(5))
        await asyncio.sleep(0)
        for step in range(3, 12):
            disk.save(step)
        return await answer

    disk.save(1)
    assert isinstance(asyncio.run(order_then_save()), StepPersisted)
    assert shard_path(disk.directory, Step(5), Rank(1)).exists()


def test_a_step_that_was_overwritten_is_refused_with_its_name(disk: Disk) -> None:
    for step in range(1, 8):
        disk.save(step)
    failed = disk.answer(2)
    assert isinstance(failed, PersistFailed)
    assert "step 2" in failed.reason


def test_dead_ranks_step_is_there_or_never_will_be(disk: Disk) -> None:
    disk.save(5, Rank(0))
    disk.running = False
    failed = disk.answer(5)
    assert isinstance(failed, PersistFailed)
    assert failed.reason == "rank 1 ended before it saved step 5"
    disk.save(5, Rank(1))
    assert isinstance(disk.answer(5), StepPersisted)


def test_a_copy_of_another_generation_is_not_the_one_meant(disk: Disk) -> None:
    disk.save(5, Rank(0))
    other = ShardWriter(disk.here.shm, Writer(rank=Rank(1), world_size=2, generation=Generation(1)))
    slot = other.begin(Step(5), 100)
    other.commit(slot, digest=0)
    disk.running = False
    assert isinstance(disk.answer(5), PersistFailed)


def test_a_directory_that_cannot_be_written_is_an_answer_and_not_a_crash(disk: Disk) -> None:
    disk.save(5)
    disk.directory.parent.mkdir(parents=True, exist_ok=True)
    disk.directory.write_text("a file is in the way")
    failed = disk.answer(5)
    assert isinstance(failed, PersistFailed)
    assert str(disk.directory) in failed.reason


def test_a_machines_own_disk_keeps_the_safe_step_and_the_new_one(disk: Disk) -> None:
    safe = NO_STEP
    for step in (5, 6, 7):
        disk.save(step)
        assert isinstance(disk.answer_local(step, safe), StepPersisted)
        assert disk.on_own_disk() == [kept for kept in (safe, step) if kept != NO_STEP]
        safe = Step(step)
    assert published(disk.directory) == []


def test_a_step_for_both_disks_is_kept_until_it_is_on_both(disk: Disk) -> None:
    """The ranks run on as soon as it is on the first."""

    async def order_both() -> list[StepPersisted | PersistFailed]:
        answers = [
            asyncio.create_task(disk.persist(5, local_disk=local_disk))
            for local_disk in (True, False)
        ]
        await asyncio.sleep(0)
        disk.save(5)
        first = await answers[0]
        for step in range(6, 12):
            disk.save(step)
        return [first, await answers[1]]

    assert [type(answer) for answer in asyncio.run(order_both())] == [StepPersisted] * 2
    assert disk.on_own_disk() == [5]
    assert shard_path(disk.directory, Step(5), Rank(1)).exists()


def test_an_own_disk_that_fails_is_an_answer_and_the_next_order_is_carried_out(disk: Disk) -> None:
    disk.save(5)
    disk.own_disk.write_text("a file is in the way")
    failed = disk.answer_local(5)
    assert isinstance(failed, PersistFailed)
    assert str(disk.own_disk) in failed.reason
    assert disk.on_own_disk() == []
    disk.own_disk.unlink()
    disk.save(6)
    assert isinstance(disk.answer_local(6), StepPersisted)
    assert disk.on_own_disk() == [6]


def test_a_disk_that_hangs_delays_nobody_for_long_and_removes_later_what_it_was_to(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_disk, "ANSWERS_WITHIN_S", 0.01)
    for step in (5, 6):
        disk.save(step)
        assert isinstance(disk.answer_local(step, 5), StepPersisted)
    hanging, answers = Event(), local_disk.inventory

    def hang(directory: Path) -> list[Copy]:
        hanging.wait()
        return answers(directory)

    async def restart() -> tuple[Copy, ...]:
        machines = OwnDisk(disk.here)
        monkeypatch.setattr(local_disk, "inventory", hang)
        await machines.look()
        seen = machines.copies
        await machines.drop_newer(Step(5))
        hanging.set()
        monkeypatch.setattr(own_disk, "ANSWERS_WITHIN_S", 30.0)
        await machines.look()
        assert {copy.step for copy in machines.copies} == {5}
        return seen

    assert asyncio.run(restart()) == ()
