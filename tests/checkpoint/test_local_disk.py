"""A machine's own disk: what is listed is whole, and whatever fails or is killed costs one copy."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from everstep.checkpoint import disk, local_disk, slots
from everstep.checkpoint.format import Expected, ShardBad
from everstep.checkpoint.slots import ShardMissing
from everstep.model import Copy, Generation, Rank, Step
from tests.checkpoint.lockstep import fork
from tests.checkpoint.plain import content, held_steps, save, writer
from tests.checkpoint.test_slots import file_size_limit

RANKS = (0, 1)
KILLS = 40


def go_on() -> None:
    pass


def put(shm: Path, directory: Path, step: int, generation: int = 1) -> None:
    """Save a step on both ranks and copy it there."""
    for rank in RANKS:
        save(writer(shm, rank, generation), rank, step, generation)
        local_disk.persist(shm, Rank(rank), Step(step), directory, go_on)


def copies(step: int, generation: int = 1) -> list[Copy]:
    return [
        Copy(rank=Rank(rank), step=Step(step), generation=Generation(generation)) for rank in RANKS
    ]


def read(directory: Path, step: int, rank: int = 0, generation: int = 1) -> bytes:
    wanted = Expected(
        step=Step(step), rank=Rank(rank), generation=Generation(generation), world_size=2
    )
    shard = local_disk.read(directory, wanted)
    shard.verify()
    return bytes(shard.payload)


def test_a_copy_is_listed_and_read_when_all_memory_is_gone(shm: Path, tmp_path: Path) -> None:
    put(shm, tmp_path, 5)
    slots.remove_all(shm)
    assert local_disk.inventory(tmp_path) == copies(5)
    assert [read(tmp_path, 5, rank) for rank in RANKS] == [content(rank, 5, 1) for rank in RANKS]


def test_only_the_steps_that_are_named_stay(shm: Path, tmp_path: Path) -> None:
    for step in (3, 6, 9):
        put(shm, tmp_path, step)
    local_disk.keep(tmp_path, (Step(3), Step(9)))
    assert local_disk.inventory(tmp_path) == copies(3) + copies(9)
    local_disk.drop_newer(tmp_path, Step(4))
    assert local_disk.inventory(tmp_path) == copies(3)
    local_disk.drop(tmp_path, Rank(1), Step(3))
    assert local_disk.inventory(tmp_path) == copies(3)[:1]
    local_disk.remove_all(tmp_path)
    assert local_disk.inventory(tmp_path) == []


def test_a_step_that_is_computed_anew_takes_the_place_of_the_former(
    shm: Path, tmp_path: Path
) -> None:
    put(shm, tmp_path, 5)
    put(shm, tmp_path, 5, generation=2)
    assert local_disk.inventory(tmp_path) == copies(5, generation=2)
    with pytest.raises(ShardBad, match="of generation 2, not of generation 1"):
        read(tmp_path, 5)


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_a_truncated_shard_is_not_listed_and_not_read(shm: Path, tmp_path: Path, size: int) -> None:
    put(shm, tmp_path, 5)
    os.truncate(disk.shard_path(tmp_path, Step(5), Rank(0)), size)
    assert local_disk.inventory(tmp_path) == copies(5)[1:]
    with pytest.raises(ShardBad, match=r"empty|no complete shard|truncated"):
        read(tmp_path, 5)


def test_a_flipped_bit_and_another_layout_are_found_when_it_is_read(
    shm: Path, tmp_path: Path
) -> None:
    put(shm, tmp_path, 5)
    path = disk.shard_path(tmp_path, Step(5), Rank(0))
    damaged = bytearray(path.read_bytes())
    damaged[50_000] ^= 16
    path.write_bytes(damaged)
    with pytest.raises(ShardBad, match="is damaged"):
        read(tmp_path, 5)
    with pytest.raises(ShardBad, match="of world size 2, not of world size 4"):
        local_disk.read(tmp_path, Expected(step=Step(5), rank=Rank(1), world_size=4))
    with pytest.raises(ShardMissing, match="cannot be read"):
        read(tmp_path, 6)


def test_a_copy_that_is_called_off_leaves_nothing(shm: Path, tmp_path: Path) -> None:
    save(writer(shm), 0, 5)

    def enough() -> None:
        raise ShardMissing("enough")

    with pytest.raises(ShardMissing, match="enough"):
        local_disk.persist(shm, Rank(0), Step(5), tmp_path, enough)
    assert list((tmp_path / "step-5").iterdir()) == []


@contextmanager
def full(directory: Path) -> Iterator[None]:
    """Nothing more fits there: a tmpfs of 64 KiB if we may mount one, else a limit of this process.

    Both are refused by the kernel in the middle of a write.
    """
    directory.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "everstep-test", str(directory)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False).returncode != 0:
        with file_size_limit(64 << 10):
            yield
        return
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def test_a_full_disk_is_an_error_and_costs_neither_memory_nor_the_next_copy(
    shm: Path, tmp_path: Path
) -> None:
    save(writer(shm), 0, 5)
    place = tmp_path / "disk"
    with full(place):
        with pytest.raises(OSError, match=r"No space left|File too large"):
            local_disk.persist(shm, Rank(0), Step(5), place, go_on)
        assert local_disk.inventory(place) == []
        assert list((place / "step-5").iterdir()) == []
    assert held_steps(shm) == [5]
    local_disk.persist(shm, Rank(0), Step(5), place, go_on)
    assert read(place, 5) == content(0, 5, 1)


def dies_at(chunk: int) -> Callable[[], None]:
    """SIGKILL of this process before so many chunks are written."""
    left = iter(range(chunk, -1, -1))

    def go_on() -> None:
        if next(left, 1) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return go_on


def test_an_agent_that_is_killed_while_it_copies_leaves_whole_shards_or_none(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep.checkpoint.disk.CHUNK_BYTES", 4096)
    rng = random.Random(int(os.environ.get("EVERSTEP_TEST_SEED", "5")))
    shards = writer(shm)
    for step in range(1, KILLS + 1):
        save(shards, 0, step)
        strikes = dies_at(rng.randrange(96))  # the payload has more chunks

        def copy(step: int, go_on: Callable[[], None]) -> None:
            local_disk.keep(tmp_path, (Step(step - 1), Step(step)))
            local_disk.persist(shm, Rank(0), Step(step), tmp_path, go_on)

        pid = fork(partial(copy, step, strikes))
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
        assert [found.step for found in local_disk.inventory(tmp_path)] == [step - 1][: step - 1]
        copy(step, go_on)  # as the next agent does, which is given the order again
        assert read(tmp_path, step) == content(0, step, 1)
        assert list(tmp_path.rglob("*.tmp")) == []
