"""Training that goes on from a checkpoint is the training that was never interrupted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from everstep.checkpoint import disk, local_disk, slots
from everstep.checkpoint.format import PAGE, Expected
from everstep.model import Generation, Rank, Step
from everstep.trainer.checkpoint import CheckpointUnusable
from everstep.trainer.heartbeat import Phase
from everstep.trainer.notices import NoticeKind
from tests.trainer.surroundings import Surroundings
from tests.trainer.training import Training, line, train, weights

STOP = 12
KEPT = (8, 9, 10, 11)
"""What is in memory after STOP steps."""


def on_disk(here: Surroundings, step: int) -> None:
    disk.persist(here.shm, Rank(0), Step(step), here.disk)
    disk.publish(here.disk, Step(step), Generation(1), world_size=1, keep=2)


def flip(here: Surroundings, step: int) -> None:
    """Damage the copy in memory."""
    shard = slots.find(here.shm, Expected(step=Step(step), rank=Rank(0)))
    with Path(shard.where).open("r+b") as file:
        file.seek(PAGE + 2000)
        byte = file.read(1)
        file.seek(PAGE + 2000)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("restore", KEPT)
def test_every_step_in_memory_restores_to_the_same_bits(here: Surroundings, restore: int) -> None:
    whole = Training()
    losses = train(here.run(), STOP, whole)
    assert here.steps_in_memory() == list(KEPT)
    again = Training()
    torch.rand(3)  # what a script draws before it restores does not count
    assert train(here.run(2, restore), STOP, again) == losses[restore + 1 :]
    assert weights(again) == weights(whole)


def test_a_step_on_disk_restores_to_the_same_bits_on_an_empty_machine(here: Surroundings) -> None:
    losses = train(here.run(), STOP)
    on_disk(here, 9)
    slots.remove_all(here.shm)
    assert train(here.run(2, 9), STOP) == losses[10:]
    (notice,) = [n for n in here.notices() if n.kind == NoticeKind.RESTORED]
    assert "step 9 from disk" in notice.text
    assert here.steps_in_memory() == [10, 11]


def test_what_is_drawn_between_restore_and_the_first_step_does_not_count(
    here: Surroundings,
) -> None:
    losses = train(here.run(), STOP)
    run = here.run(2, 9)
    work = Training()
    checkpoint = run.checkpoint(work.state())
    start = checkpoint.restore()
    torch.rand(100)
    for _ in run.steps(start=start, stop=11):
        assert line(10, work.forward_backward()) == losses[10]


def test_a_fresh_start_restores_nothing(here: Surroundings) -> None:
    assert here.run().checkpoint(Training().state()).restore() == 0
    assert here.kinds() == []


def test_the_agent_sees_that_a_rank_restores_and_from_where(here: Surroundings) -> None:
    train(here.run(), STOP)
    run = here.run(2, 10)
    assert run.checkpoint(Training().state()).restore() == 11
    assert here.beat().phase == Phase.RESTORING
    (notice,) = here.notices()
    assert (notice.kind, notice.step, notice.generation) == (NoticeKind.RESTORED, 10, 2)
    assert "from memory in" in notice.text


def test_a_damaged_copy_in_memory_is_dropped_and_the_disk_used(here: Surroundings) -> None:
    losses = train(here.run(), STOP)
    on_disk(here, 9)
    flip(here, 9)
    assert train(here.run(2, 9), STOP) == losses[10:]
    assert NoticeKind.COPY_BAD in here.kinds()
    assert 9 not in here.steps_in_memory()


def test_without_a_good_copy_restoring_fails_and_the_next_restart_is_not_sent_there(
    here: Surroundings,
) -> None:
    losses = train(here.run(), STOP)
    flip(here, 10)
    with pytest.raises(CheckpointUnusable, match=r"cannot restore step 10 .*damaged.*published"):
        train(here.run(2, 10), STOP)
    assert here.steps_in_memory() == [8, 9, 11]
    slots.drop_newer(here.shm, Rank(0), Step(9))
    assert train(here.run(2, 9), STOP) == losses[10:]


def test_a_damaged_copy_on_disk_is_withdrawn(here: Surroundings) -> None:
    train(here.run(), STOP)
    on_disk(here, 9)
    slots.remove_all(here.shm)
    os.truncate(disk.shard_path(here.disk, Step(9), Rank(0)), 9000)
    with pytest.raises(CheckpointUnusable, match="truncated"):
        here.run(2, 9).checkpoint(Training().state()).restore()
    assert disk.published(here.disk) == []


def test_the_machines_own_disk_gives_what_memory_lost_and_a_bad_copy_there_is_dropped(
    here: Surroundings, tmp_path: Path
) -> None:
    here.local_disk = tmp_path / "nvme"
    losses = train(here.run(), STOP)
    on_disk(here, 9)
    local_disk.persist(here.shm, Rank(0), Step(9), here.local_disk, lambda: None)
    slots.remove_all(here.shm)
    assert train(here.run(2, 9), 10) == losses[10:10]
    path = disk.shard_path(here.local_disk, Step(9), Rank(0))
    content = bytearray(path.read_bytes())
    content[PAGE + 2000] ^= 1
    path.write_bytes(content)
    slots.remove_all(here.shm)
    assert train(here.run(3, 9, 1), STOP) == losses[10:]
    places = [notice.text for notice in here.notices() if notice.kind == NoticeKind.RESTORED]
    assert ["own disk" in text for text in places] == [True, False]
    assert not path.exists()


def test_a_copy_of_another_generation_is_not_restored(here: Surroundings) -> None:
    train(here.run(), STOP)
    with pytest.raises(CheckpointUnusable, match="of generation 1, not of generation 4"):
        here.run(5, 10).checkpoint(Training().state()).restore()


def test_a_step_that_nobody_has_is_not_restored(here: Surroundings) -> None:
    with pytest.raises(CheckpointUnusable, match="no complete copy of step 3"):
        here.run(2, 3).checkpoint(Training().state()).restore()


def test_another_model_fails_with_its_name_and_keeps_the_copy(here: Surroundings) -> None:
    train(here.run(), STOP)
    state = Training().state() | {"model": torch.nn.Linear(2, 2)}
    with pytest.raises(CheckpointUnusable, match="step 10 does not fit 'model'"):
        here.run(2, 10).checkpoint(state).restore()
    assert 10 in here.steps_in_memory()


def test_restoring_works_even_where_saving_is_refused(here: Surroundings) -> None:
    train(here.run(), STOP)
    work = Training()
    run = here.run(2, 10)
    run.checkpoint({"a": work.model})  # a second checkpoint never saves
    assert run.checkpoint(work.state()).restore() == 11
