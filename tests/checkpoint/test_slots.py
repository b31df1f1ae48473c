"""Slots under bad input: too little memory, truncation, flipped bits, another job's shards."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from everstep.checkpoint import slots
from everstep.checkpoint.digest import check_digest
from everstep.checkpoint.format import PAGE, Expected, ShardBad, erase
from everstep.checkpoint.need import SLOTS
from everstep.checkpoint.pins import pin_for_disk
from everstep.checkpoint.slots import (
    ShardLost,
    ShardMissing,
    ShardWriter,
    SharedMemoryTooSmall,
    Writer,
)
from everstep.model import Copy, Generation, Rank, Step
from everstep.paths import rank_shm
from tests.checkpoint.plain import check, content, digest, held_steps, save, writer

MIB = 1 << 20
EXPECTED = Expected(step=Step(3), rank=Rank(0), generation=Generation(1), world_size=2)


def slot_of(shm: Path, step: int, rank: int = 0) -> Path:
    """The file that holds this step."""
    return Path(slots.find(shm, Expected(step=Step(step), rank=Rank(rank))).where)


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """No file of this process may grow beyond the limit: what a full file system feels like."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def small_shm(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 4 MiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "everstep-test", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("only root may mount a small tmpfs; test_a_refused_reservation covers the rest")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


# --- what is saved is found ----------------------------------------------------------------------


def test_the_newest_steps_are_listed_and_hold_what_was_saved(shm: Path) -> None:
    shards = writer(shm)
    for step in range(7):
        save(shards, 0, step)
    assert held_steps(shm) == [3, 4, 5, 6]
    for copy in slots.inventory(shm, [Rank(0)]):
        check(shm, copy)


def test_a_restarted_writer_reuses_memory_and_overwrites_the_oldest_first(shm: Path) -> None:
    before = writer(shm)
    for step in range(4):
        save(before, 0, step)
    inodes = {path.name: path.stat().st_ino for path in rank_shm(shm, Rank(0)).iterdir()}
    save(writer(shm, generation=2), 0, 4, generation=2)
    assert held_steps(shm) == [1, 2, 3, 4]
    assert inodes == {path.name: path.stat().st_ino for path in rank_shm(shm, Rank(0)).iterdir()}


def test_a_pinned_step_stays_until_it_is_released(shm: Path) -> None:
    shards = writer(shm)
    pin_for_disk(shm, Rank(0), Step(2))
    for step in range(9):
        save(shards, 0, step)
    assert held_steps(shm) == [2, 6, 7, 8]
    pin_for_disk(shm, Rank(0), None)
    save(shards, 0, 9)
    assert held_steps(shm) == [6, 7, 8, 9]


def test_steps_after_the_restored_one_are_dropped(shm: Path) -> None:
    shards = writer(shm)
    for step in range(4):
        save(shards, 0, step)
    slots.drop_newer(shm, Rank(0), Step(1))
    assert held_steps(shm) == [0, 1]


def test_copies_of_an_abandoned_future_are_overwritten_first(shm: Path) -> None:
    shards = writer(shm)
    for step in (10, 11, 12, 13):
        save(shards, 0, step)
    after = writer(shm, generation=2)
    for step in (12, 13):
        save(after, 0, step, generation=2)
    assert slots.inventory(shm, [Rank(0)]) == [
        Copy(rank=Rank(0), step=Step(step), generation=Generation(generation))
        for step, generation in ((10, 1), (11, 1), (12, 2), (13, 2))
    ]


def test_a_slot_that_is_being_written_is_not_listed(shm: Path) -> None:
    shards = writer(shm)
    save(shards, 0, 0)
    shards.begin(Step(1), 100)
    assert held_steps(shm) == [0]


def test_a_copy_taken_back_is_not_listed(shm: Path) -> None:
    shards = writer(shm)
    shards.void(save(shards, 0, 0))
    assert held_steps(shm) == []


def test_what_is_not_there_is_missing_and_what_was_overwritten_is_lost(shm: Path) -> None:
    with pytest.raises(ShardMissing, match="newest is None"):
        slots.find(shm, EXPECTED)
    shards = writer(shm)
    save(shards, 0, 2)
    with pytest.raises(ShardMissing, match="newest is 2"):
        slots.find(shm, EXPECTED)
    save(shards, 0, 4)
    with pytest.raises(ShardLost, match="newest is 4"):
        slots.find(shm, EXPECTED)


def test_removing_everything_leaves_nothing_and_may_be_repeated(shm: Path) -> None:
    save(writer(shm), 0, 0)
    slots.remove_all(shm)
    assert not shm.exists()
    slots.remove_all(shm)


def test_a_reader_cannot_harm_the_copy_that_it_reads(shm: Path) -> None:
    save(writer(shm), 0, 3)
    slots.find(shm, EXPECTED).payload[:4] = b"oops"
    check_digest(slots.find(shm, EXPECTED))


# --- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("pinned", [True, False])
def test_a_flipped_bit_in_the_payload_is_found(shm: Path, *, pinned: bool) -> None:
    if pinned:
        pin_for_disk(shm, Rank(0), Step(3))
    slot = save(writer(shm), 0, 3)
    check_digest(slots.find(shm, EXPECTED))
    slot.payload[70_000] ^= 4
    with pytest.raises(ShardBad, match="is damaged: its digest is"):
        check_digest(slots.find(shm, EXPECTED))


@pytest.mark.parametrize("at", [0, 9, 20, 40, 55, 60, 70])
def test_a_flipped_bit_in_the_header_makes_the_slot_no_slot(shm: Path, at: int) -> None:
    slot = save(writer(shm), 0, 3)
    slot.page[at] ^= 1
    assert held_steps(shm) == []


@pytest.mark.parametrize("size", [0, 100, PAGE, PAGE + 5000])
def test_a_truncated_slot_is_no_slot_and_is_reserved_anew(shm: Path, size: int) -> None:
    save(writer(shm), 0, 3)
    os.truncate(slot_of(shm, 3), size)
    assert held_steps(shm) == []
    save(writer(shm), 0, 4)
    assert held_steps(shm) == [4]


@pytest.mark.parametrize(
    ("foreign", "sentence"),
    [
        ({"generation": Generation(2)}, "of generation 1, not of generation 2"),
        ({"world_size": 4}, "of world size 2, not of world size 4"),
    ],
)
def test_a_shard_of_another_generation_or_layout_is_refused(
    shm: Path, foreign: dict[str, int], sentence: str
) -> None:
    save(writer(shm), 0, 3)
    expected = {"step": 3, "rank": 0, "generation": 1, "world_size": 2} | foreign
    with pytest.raises(ShardBad, match=sentence):
        slots.find(shm, Expected(**expected))  # type: ignore[arg-type]


def test_a_slot_of_another_rank_is_not_listed(shm: Path) -> None:
    save(writer(shm), 0, 3)
    rank_shm(shm, Rank(0)).rename(rank_shm(shm, Rank(1)))
    assert slots.inventory(shm, [Rank(1)]) == []


def test_slots_of_another_layout_are_overwritten_first(shm: Path) -> None:
    old = writer(shm, world_size=4)
    for step in range(3):
        save(old, 0, step)
    new = writer(shm, world_size=2)
    save(new, 0, 3)
    save(new, 0, 4)
    assert [step for step in held_steps(shm) if step > 2] == [3, 4]


def test_before_a_start_ranks_of_another_size_leave_their_memory_but_for_what_is_restored(
    shm: Path,
) -> None:
    for rank in (0, 2):
        old = writer(shm, rank, world_size=3)
        for step in range(1, 5):
            save(old, rank, step)
    slots.make_way(shm, [Rank(0)], Step(3))
    assert slots.ranks_in(shm) == [Rank(0), Rank(2)]
    assert held_steps(shm) == [1, 2, 3]
    assert slots.inventory(shm, [Rank(2)]) == [
        Copy(rank=Rank(2), step=Step(3), generation=Generation(1))
    ]
    assert len(list(rank_shm(shm, Rank(2)).glob("slot-*"))) == 1
    new = writer(shm, 0, generation=2, world_size=2)
    save(new, 0, 4, generation=2)
    assert 3 in held_steps(shm), "another rank may be reading it still"
    slots.forget_others(shm, [Rank(0)], Step(3))
    assert Rank(2) in slots.ranks_in(shm), "nothing newer is safe yet"
    slots.forget_others(shm, [Rank(0)], Step(4))
    assert slots.ranks_in(shm) == [Rank(0)]


def test_a_bad_copy_that_was_dropped_is_not_listed(shm: Path) -> None:
    shards = writer(shm)
    save(shards, 0, 3)
    header = save(shards, 0, 4).header
    slots.drop(shm, header)
    assert held_steps(shm) == [3]
    slots.drop_step(shm, Rank(0), Step(3))
    assert held_steps(shm) == []


# --- too little memory ---------------------------------------------------------------------------


def test_a_small_shm_is_refused_with_the_figure_needed_and_holds_nothing(small_shm: Path) -> None:
    who = Writer(rank=Rank(0), world_size=8, generation=Generation(1), local_ranks=8)
    shards = ShardWriter(small_shm, who)
    with pytest.raises(SharedMemoryTooSmall, match=r"need 34\.1 MiB .* 8 ranks .*4 slots.*--shm"):
        shards.reserve(MIB)
    assert list(small_shm.glob("rank-*/slot-*")) == []


def test_state_that_outgrows_shm_is_refused_and_what_is_there_stays(small_shm: Path) -> None:
    shards = writer(small_shm)
    shards.reserve(len(content(0, 63, 1)))
    for step in range(4):
        save(shards, 0, step)
    with pytest.raises(SharedMemoryTooSmall, match=r"has 1\.25 MiB left"):
        shards.begin(Step(4), 3 * MIB)
    assert held_steps(small_shm) == [0, 1, 2, 3]
    save(shards, 0, 5)
    assert held_steps(small_shm) == [1, 2, 3, 5]


def test_a_refused_reservation_leaves_no_slot_behind(shm: Path) -> None:
    shards = writer(shm)
    with file_size_limit(MIB), pytest.raises(SharedMemoryTooSmall, match="File too large"):
        shards.reserve(2 * MIB)
    assert list(shm.glob("rank-*/slot-*")) == []


def test_state_that_grows_gets_room_slot_by_slot(shm: Path) -> None:
    shards = writer(shm)
    shards.reserve(1000)
    for step in range(5):
        slot = shards.begin(Step(step), (1 + step) * MIB)
        slot.payload[-1] = step
        shards.commit(slot, digest(bytes(slot.payload)))
    assert held_steps(shm) == [1, 2, 3, 4]
    for step in range(1, 5):
        shard = slots.find(shm, Expected(step=Step(step), rank=Rank(0)))
        check_digest(shard)
        assert len(shard.payload) == (1 + step) * MIB


def test_prefaulting_ends_and_changes_nothing(shm: Path) -> None:
    shards = writer(shm)
    save(shards, 0, 0)
    shards.reserve(2 * MIB)
    pieces = 0
    while shards.prefault(MIB):
        pieces += 1
    assert pieces >= 2 * SLOTS
    (copy,) = slots.inventory(shm, [Rank(0)])
    check(shm, copy)


def test_erasing_a_page_needs_no_more_than_its_first_word(shm: Path) -> None:
    slot = save(writer(shm), 0, 0)
    before = bytes(slot.page[8:])
    erase(slot.page)
    assert bytes(slot.page[8:]) == before
