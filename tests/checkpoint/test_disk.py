"""The disk tier: published steps are whole, leftovers go, and every failure is an error in time."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from everstep.checkpoint import disk, slots
from everstep.checkpoint.digest import check_digest
from everstep.checkpoint.disk import MANIFEST, persist, publish, published, read, shard_path
from everstep.checkpoint.format import Expected, ShardBad
from everstep.checkpoint.slots import ShardLost, ShardMissing
from everstep.model import Generation, Published, Rank, Step
from tests.checkpoint.plain import content, held_steps, save, writer
from tests.checkpoint.test_slots import file_size_limit

RANKS = (0, 1)


def put(shm: Path, directory: Path, step: int, generation: int = 1) -> None:
    """Save and persist a step on both ranks."""
    for rank in RANKS:
        save(writer(shm, rank, generation), rank, step, generation)
        persist(shm, Rank(rank), Step(step), directory)


def declare(directory: Path, step: int, generation: int = 1, keep: int = 2) -> None:
    publish(directory, Step(step), Generation(generation), world_size=2, keep=keep)


def expected(step: int, rank: int = 0, generation: int = 1) -> Expected:
    return Expected(
        step=Step(step), rank=Rank(rank), generation=Generation(generation), world_size=2
    )


def steps(directory: Path) -> list[int]:
    return [item.step for item in published(directory)]


def test_a_published_step_holds_what_was_saved(shm: Path, tmp_path: Path) -> None:
    put(shm, tmp_path, 5)
    assert published(tmp_path) == []
    declare(tmp_path, 5)
    assert published(tmp_path) == [Published(step=Step(5), generation=Generation(1))]
    shard = read(tmp_path, expected(5, rank=1))
    shard.verify()
    assert shard.crc is not None
    assert shard.payload == content(1, 5, 1)


def test_steps_beyond_the_kept_ones_and_leftovers_before_them_go(shm: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not ours")
    for step in (1, 2, 3, 4):
        put(shm, tmp_path, step)
        if step != 2:
            declare(tmp_path, step)
    assert steps(tmp_path) == [3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step-3", "step-4"]


def test_a_step_that_misses_a_shard_is_not_published(shm: Path, tmp_path: Path) -> None:
    put(shm, tmp_path, 1)
    shard_path(tmp_path, Step(1), Rank(1)).unlink()
    with pytest.raises(ShardMissing, match=r"rank-1\.shard is missing"):
        declare(tmp_path, 1)
    assert steps(tmp_path) == []


def test_shards_of_two_generations_are_not_published_together(shm: Path, tmp_path: Path) -> None:
    put(shm, tmp_path, 1)
    save(writer(shm, 1, generation=2), 1, 1, generation=2)
    persist(shm, Rank(1), Step(1), tmp_path)
    with pytest.raises(ShardBad, match="of generation 2, not of generation 1"):
        declare(tmp_path, 1)


def test_a_step_computed_anew_withdraws_the_published_one_until_it_is_whole(
    shm: Path, tmp_path: Path
) -> None:
    put(shm, tmp_path, 1)
    declare(tmp_path, 1)
    save(writer(shm, 0, generation=2), 0, 1, generation=2)
    persist(shm, Rank(0), Step(1), tmp_path)
    assert steps(tmp_path) == []


def test_persisting_twice_is_the_same_as_once(shm: Path, tmp_path: Path) -> None:
    put(shm, tmp_path, 1)
    declare(tmp_path, 1)
    assert persist(shm, Rank(0), Step(1), tmp_path) == shard_path(tmp_path, Step(1), Rank(0))
    assert steps(tmp_path) == [1]


def test_a_step_not_saved_yet_or_overwritten_is_said_to_be(shm: Path, tmp_path: Path) -> None:
    with pytest.raises(ShardMissing):
        persist(shm, Rank(0), Step(1), tmp_path)
    shards = writer(shm)
    for step in range(9):
        save(shards, 0, step)
    with pytest.raises(ShardLost):
        persist(shm, Rank(0), Step(1), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_was_damaged_in_memory_before_it_got_to_disk_is_found(
    shm: Path, tmp_path: Path
) -> None:
    for rank in RANKS:
        save(writer(shm, rank), rank, 2).payload[1000] ^= rank
        persist(shm, Rank(rank), Step(2), tmp_path)
    declare(tmp_path, 2)
    check_digest(read(tmp_path, expected(2)))
    damaged = read(tmp_path, expected(2, rank=1))
    damaged.verify()
    with pytest.raises(ShardBad, match="is damaged: its digest is"):
        check_digest(damaged)


@pytest.mark.parametrize("limit", [0, 4096, 100_000])
def test_a_full_disk_leaves_no_half_file_and_the_copy_in_memory(
    shm: Path, tmp_path: Path, limit: int
) -> None:
    save(writer(shm), 0, 1)
    with file_size_limit(limit), pytest.raises(OSError, match="File too large"):
        persist(shm, Rank(0), Step(1), tmp_path)
    assert list((tmp_path / "step-1").iterdir()) == []
    assert held_steps(shm) == [1]


def test_a_directory_that_cannot_be_written_is_an_error(shm: Path, tmp_path: Path) -> None:
    save(writer(shm), 0, 1)
    with pytest.raises(OSError, match=r"sys"):
        persist(shm, Rank(0), Step(1), Path("/sys/everstep-checkpoints"))
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"Not a directory"):
        persist(shm, Rank(0), Step(1), tmp_path / "file")


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_a_truncated_shard_is_neither_published_nor_read(
    shm: Path, tmp_path: Path, size: int
) -> None:
    put(shm, tmp_path, 1)
    declare(tmp_path, 1)
    os.truncate(shard_path(tmp_path, Step(1), Rank(0)), size)
    assert published(tmp_path) == []
    with pytest.raises(ShardBad, match=r"empty|no complete shard|truncated"):
        read(tmp_path, expected(1))
    with pytest.raises(ShardBad, match="truncated or no shard"):
        declare(tmp_path, 1)


def test_a_flipped_bit_on_disk_is_found(shm: Path, tmp_path: Path) -> None:
    put(shm, tmp_path, 1)
    declare(tmp_path, 1)
    path = shard_path(tmp_path, Step(1), Rank(0))
    damaged = bytearray(path.read_bytes())
    damaged[50_000] ^= 16
    path.write_bytes(damaged)
    with pytest.raises(ShardBad, match="is damaged"):
        read(tmp_path, expected(1)).verify()


def test_another_generation_or_an_unpublished_step_is_not_read(shm: Path, tmp_path: Path) -> None:
    put(shm, tmp_path, 1)
    with pytest.raises(ShardMissing, match="not published"):
        read(tmp_path, expected(1))
    declare(tmp_path, 1)
    with pytest.raises(ShardBad, match="of generation 1, not of generation 3"):
        read(tmp_path, expected(1, generation=3))
    shard_path(tmp_path, Step(1), Rank(0)).unlink()
    with pytest.raises(ShardMissing, match="cannot be read"):
        read(tmp_path, expected(1))


@pytest.mark.parametrize("manifest", [b"", b"{", b"{}", b'{"step": "x"}', b"[1]"])
def test_a_garbled_manifest_publishes_nothing(shm: Path, tmp_path: Path, manifest: bytes) -> None:
    put(shm, tmp_path, 1)
    declare(tmp_path, 1)
    (tmp_path / "step-1" / MANIFEST).write_bytes(manifest)
    assert published(tmp_path) == []


def test_a_withdrawn_step_is_gone_and_withdrawing_twice_is_fine(shm: Path, tmp_path: Path) -> None:
    put(shm, tmp_path, 1)
    declare(tmp_path, 1)
    disk.withdraw(tmp_path, Step(1))
    disk.withdraw(tmp_path, Step(1))
    assert published(tmp_path) == []


def test_the_copy_on_disk_outlives_the_machine(shm: Path, tmp_path: Path) -> None:
    put(shm, tmp_path, 1)
    declare(tmp_path, 1)
    slots.remove_all(shm)
    read(tmp_path, expected(1)).verify()


def test_a_directory_that_does_not_exist_holds_no_steps(tmp_path: Path) -> None:
    assert published(tmp_path / "none") == []
    shutil.rmtree(tmp_path)
    assert published(tmp_path) == []
