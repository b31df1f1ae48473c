"""The remote tier on fsspec's memory store: atomic, bounded, honest about what fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from everstep.checkpoint import slots
from everstep.checkpoint.digest import check_digest
from everstep.checkpoint.format import PAGE, Expected, ShardBad
from everstep.checkpoint.remote import RemoteTier
from everstep.checkpoint.slots import ShardLost, ShardMissing
from everstep.checkpoint.tier import DirectoryTier, Tier, TierFailed, is_url, tier_at
from everstep.model import Generation, Published, Rank, Step
from tests.checkpoint.plain import content, save, writer

WORLD = 2
URL = "memory://bucket/job"


class Unreliable(MemoryFileSystem):
    """A store that fails as a test says, with an error that is no OSError, as theirs often are."""

    protocol = "unreliable"
    cachable = False
    failing: tuple[str, ...] = ()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return f"/{path.removeprefix('unreliable://').strip('/')}"

    def open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        self._maybe_fail(f"open {mode}")
        return super().open(path, mode, **more)

    def ls(self, path: str, detail: bool = True, **more: Any) -> Any:
        self._maybe_fail("ls")
        return super().ls(path, detail, **more)

    def _maybe_fail(self, doing: str) -> None:
        if doing in self.failing:
            raise RuntimeError(f"EndpointConnectionError:\n could not connect ({doing})")


fsspec.register_implementation("unreliable", Unreliable, clobber=True)


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tier]:
    monkeypatch.setattr(Unreliable, "failing", ())
    yield tier_at("unreliable://bucket/job")
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def save_all(shm: Path, step: int, generation: int = 1) -> None:
    for rank in range(WORLD):
        save(writer(shm, rank, generation), rank, step, generation)


def persist_all(tier: Tier, shm: Path, step: int) -> None:
    for rank in range(WORLD):
        tier.persist(shm, Rank(rank), Step(step))


def entry(step: int, generation: int = 1) -> Published:
    return Published(step=Step(step), generation=Generation(generation))


def put(tier: Tier, shm: Path, step: int, generation: int = 1, keep: int = 2) -> None:
    """A step's whole way into the tier."""
    save_all(shm, step, generation)
    persist_all(tier, shm, step)
    tier.publish(entry(step, generation), WORLD, keep)


def names() -> set[str]:
    return set(MemoryFileSystem.store)


def test_a_published_step_is_read_back_by_every_rank_bit_for_bit(tier: Tier, shm: Path) -> None:
    put(tier, shm, 5)
    assert tier.published() == [entry(5)]
    for rank in range(WORLD):
        expected = Expected(step=Step(5), rank=Rank(rank), generation=Generation(1), world_size=2)
        shard = tier.read(expected)
        shard.verify()
        assert shard.crc is not None
        assert bytes(shard.payload) == content(rank, 5, 1)


def test_a_shard_of_many_pieces_is_read_in_any_order(
    tier: Tier, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep.checkpoint.remote.CHUNK_BYTES", 1000)
    put(tier, shm, 5)
    shard = tier.read(Expected(step=Step(5), rank=Rank(1)))
    shard.verify()
    assert bytes(shard.payload) == content(1, 5, 1)


def test_a_step_that_is_not_whole_is_not_published(tier: Tier, shm: Path) -> None:
    save_all(shm, 5)
    tier.persist(shm, Rank(0), Step(5))
    with pytest.raises(ShardMissing, match=r"rank-1\.shard is missing: step 5 is not complete"):
        tier.publish(entry(5), WORLD, 2)
    assert tier.published() == []
    with pytest.raises(ShardMissing, match="step 5 is not published"):
        tier.read(Expected(step=Step(5), rank=Rank(0)))


def test_a_truncated_shard_is_not_published_and_no_longer_counts(tier: Tier, shm: Path) -> None:
    save_all(shm, 5)
    persist_all(tier, shm, 5)
    path = "/bucket/job/step-5/gen-1/rank-1.shard"
    whole = MemoryFileSystem().cat_file(path)
    MemoryFileSystem().pipe_file(path, whole[:-1])
    with pytest.raises(ShardBad, match="truncated"):
        tier.publish(entry(5), WORLD, 2)
    MemoryFileSystem().pipe_file(path, whole)
    tier.publish(entry(5), WORLD, 2)
    MemoryFileSystem().pipe_file(path, whole[:-1])
    assert tier.published() == []
    with pytest.raises(ShardBad, match="truncated"):
        tier.read(Expected(step=Step(5), rank=Rank(1)))


def test_a_flipped_bit_is_found_when_the_shard_is_verified(tier: Tier, shm: Path) -> None:
    put(tier, shm, 5)
    path = "/bucket/job/step-5/gen-1/rank-0.shard"
    damaged = bytearray(MemoryFileSystem().cat_file(path))
    damaged[PAGE + 50] ^= 1
    MemoryFileSystem().pipe_file(path, bytes(damaged))
    with pytest.raises(ShardBad, match="damaged"):
        tier.read(Expected(step=Step(5), rank=Rank(0))).verify()
    tier.withdraw(Step(5))
    assert tier.published() == []
    tier.withdraw(Step(5))


def test_only_the_newest_steps_are_kept_and_leftovers_of_older_ones_go(
    tier: Tier, shm: Path
) -> None:
    put(tier, shm, 1)
    save_all(shm, 2)
    tier.persist(shm, Rank(0), Step(2))
    for step in (3, 4, 5):
        put(tier, shm, step)
    assert tier.published() == [entry(4), entry(5)]
    assert {name.split("/")[3] for name in names()} == {"step-4", "step-5"}


def test_a_step_computed_anew_replaces_the_published_one(tier: Tier, shm: Path) -> None:
    put(tier, shm, 5, generation=1)
    put(tier, shm, 5, generation=2)
    assert tier.published() == [entry(5, 2)]
    shard = tier.read(Expected(step=Step(5), rank=Rank(0), generation=Generation(2)))
    assert bytes(shard.payload) == content(0, 5, 2)
    assert not any("gen-1" in name for name in names())


def test_a_writer_of_an_older_generation_that_comes_late_publishes_nothing(
    tier: Tier, shm: Path
) -> None:
    save_all(shm, 5, generation=1)
    persist_all(tier, shm, 5)
    put(tier, shm, 5, generation=2)
    before = names()
    save_all(shm, 5, generation=1)
    persist_all(tier, shm, 5)
    with pytest.raises(TierFailed, match="generation 1 came too late: generation 2 has published"):
        tier.publish(entry(5, 1), WORLD, 2)
    assert tier.published() == [entry(5, 2)]
    assert before <= names()


def test_publishing_twice_is_no_error(tier: Tier, shm: Path) -> None:
    put(tier, shm, 5)
    tier.publish(entry(5), WORLD, 2)
    assert tier.published() == [entry(5)]


@pytest.mark.parametrize("failing", ["open wb", "ls", "open xb"])
def test_a_store_that_cannot_be_reached_is_one_clear_sentence_and_can_be_tried_again(
    tier: Tier, shm: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    save_all(shm, 5)
    monkeypatch.setattr(Unreliable, "failing", (failing,))
    sentence = r"^unreliable://bucket/job could not .*: EndpointConnectionError: could not connect"
    with pytest.raises(TierFailed, match=sentence):
        put(tier, shm, 5)
    monkeypatch.setattr(Unreliable, "failing", ())
    put(tier, shm, 5)
    assert tier.published() == [entry(5)]


def test_what_is_published_is_not_guessed_when_the_store_is_away(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty answer would start the job anew at step 0."""
    monkeypatch.setattr(Unreliable, "failing", ("ls",))
    with pytest.raises(TierFailed, match="could not be listed"):
        tier.published()


def test_a_slot_that_is_overwritten_under_way_is_lost_and_leaves_nothing(
    tier: Tier, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(shm, 5)
    monkeypatch.setattr(slots, "unchanged", lambda *_: False)
    with pytest.raises(ShardLost, match="rank 0 overwrote step 5"):
        tier.persist(shm, Rank(0), Step(5))
    assert names() == set()


def test_what_was_damaged_in_memory_before_it_was_stored_is_found(tier: Tier, shm: Path) -> None:
    for rank in range(WORLD):
        save(writer(shm, rank), rank, 5).payload[100] ^= rank
    persist_all(tier, shm, 5)
    tier.publish(entry(5), WORLD, 2)
    check_digest(tier.read(Expected(step=Step(5), rank=Rank(0))))
    with pytest.raises(ShardBad, match="is damaged: its digest is"):
        check_digest(tier.read(Expected(step=Step(5), rank=Rank(1))))


def test_paths_and_file_urls_are_directories_and_all_else_is_for_fsspec(tmp_path: Path) -> None:
    assert isinstance(tier_at(str(tmp_path)), DirectoryTier)
    assert isinstance(tier_at(f"file://{tmp_path}"), DirectoryTier)
    assert isinstance(tier_at(URL), RemoteTier)
    assert [is_url(text) for text in ("/a", "a:/b", "file:///a", "s3://b")] == [False] * 3 + [True]


def test_a_store_without_its_package_is_named() -> None:
    with pytest.raises(TierFailed, match=r"^s3://bucket/x could not be opened: .*s3fs"):
        tier_at("s3://bucket/x")
    with pytest.raises(TierFailed, match=r"could not be opened: .*nowhere"):
        tier_at("nowhere://bucket/x")


def test_without_fsspec_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.delitem(sys.modules, "everstep.checkpoint.remote", raising=False)
    with pytest.raises(TierFailed, match=r"need fsspec: install everstep\[remote\]"):
        tier_at("s3://bucket/x")
