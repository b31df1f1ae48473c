"""Replicas write one copy together: each gets its own bytes back, or an error, never others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint import disk, replicas, slices, slots
from everstep.checkpoint.digest import digest_of
from everstep.checkpoint.format import (
    NO_REPLICAS,
    Expected,
    Header,
    Shard,
    ShardBad,
    crc_of,
    unpack_index,
)
from everstep.checkpoint.tier import Tier, tier_at
from everstep.model import Generation, Published, Rank, Step, ranks_in
from tests.checkpoint.nets import Training, checkpoint, same
from tests.checkpoint.payloads import ALL, payload_of
from tests.checkpoint.ranks import Ranks

STEP = Step(4)


def shard_of(rank: int, payload: memoryview) -> Shard:
    header = Header(
        step=STEP,
        generation=Generation(1),
        rank=Rank(rank),
        world_size=len(ALL),
        sequence=1,
        payload_bytes=len(payload),
        digest=0,
    )
    return Shard(header, crc_of(payload), payload, f"rank {rank}")


def written(part: slices.Part, rank: int) -> Shard:
    return shard_of(rank, memoryview(bytearray(b"".join(part.chunks))))


def cut(shard: Shard) -> slices.Part:
    part = slices.cut(shard)
    assert part is not None
    return part


@given(
    sizes=st.lists(st.tuples(st.integers(0, 900), st.sampled_from([0, NO_REPLICAS])), max_size=6),
    own=st.integers(0, 200),
)
def test_every_rank_gets_its_own_bytes_back_from_the_parts(
    sizes: list[tuple[int, int]], own: int
) -> None:
    shards = [shard_of(rank, payload_of(rank, [*sizes, (500, 0)], own + rank)) for rank in ALL]
    parts = [written(cut(shard), rank) for rank, shard in enumerate(shards)]
    assert slices.differing({rank: slices.head_of(parts[rank].payload) for rank in ALL}) is None
    for rank, shard in enumerate(shards):
        joined = slices.join(parts[rank], parts.__getitem__)
        joined.verify()
        assert joined.payload == shard.payload
        assert joined.header == shard.header


@given(nbytes=st.integers(0, 10_000), count=st.integers(2, 9))
def test_slices_follow_each_other_and_end_where_the_tensor_does(nbytes: int, count: int) -> None:
    found = [slices.slice_of(nbytes, count, position) for position in range(count)]
    assert found[0][0] == 0
    assert found[-1][1] == nbytes
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(found))


def test_together_replicas_write_little_more_than_one_copy() -> None:
    shards = [shard_of(rank, payload_of(rank, [(3 << 20, 0)], 100)) for rank in ALL]
    total = sum(cut(shard).nbytes for shard in shards)
    assert 3 << 20 < total < (3 << 20) + 100_000


def three(sizes: list[tuple[int, int]]) -> list[Shard]:
    return [written(cut(shard_of(rank, payload_of(rank, sizes, 9))), rank) for rank in ALL]


def excerpt(shard: Shard, reader: int) -> Shard:
    return written(slices.excerpt(shard, Rank(reader)), shard.header.rank)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 900), st.sampled_from([0, NO_REPLICAS])), max_size=6),
    whole=st.booleans(),
)
def test_a_reader_needs_no_more_of_others_than_their_slices(
    sizes: list[tuple[int, int]], *, whole: bool
) -> None:
    shards = [shard_of(rank, payload_of(rank, [*sizes, (500, 0)], 9)) for rank in ALL]
    parts = [written(cut(shard), rank) for rank, shard in enumerate(shards)]
    for rank, shard in enumerate(shards):
        excerpts = [excerpt(shards[r] if whole else parts[r], rank) for r in ALL]
        joined = slices.join(parts[rank], excerpts.__getitem__)
        assert joined.payload == shard.payload


def test_a_rank_and_its_readers_move_one_shard_and_a_few_tables() -> None:
    shards = [shard_of(rank, payload_of(rank, [(3 << 20, 0)], 100)) for rank in ALL]
    came = [cut(shards[0]).nbytes, *(slices.excerpt(shards[r], Rank(0)).nbytes for r in (1, 2))]
    assert 3 << 20 < sum(came) < (3 << 20) + 100_000


def test_slices_are_given_only_of_what_the_reader_has_too() -> None:
    shard = shard_of(0, payload_of(0, [(5000, 0)], 9))
    assert slices.excerpt(shard, Rank(1)).nbytes > slices.excerpt(shard, Rank(7)).nbytes


def test_joined_bytes_go_where_the_caller_has_room() -> None:
    shards = [shard_of(rank, payload_of(rank, [(700, 0)], 9)) for rank in ALL]
    parts = [written(cut(shard), rank) for rank, shard in enumerate(shards)]
    room = bytearray(len(shards[1].payload))
    slices.join(parts[1], parts.__getitem__, lambda size: memoryview(room)[:size])
    assert room == shards[1].payload


def test_the_size_of_a_part_is_known_before_it_is_cut() -> None:
    payload = payload_of(1, [(90_000, 0), (500, NO_REPLICAS)], 9)
    index, _ = unpack_index(payload)
    part = cut(shard_of(1, payload))
    assert slices.part_bytes(index, len(payload), Rank(1)) == part.nbytes - len(part.chunks[0])
    alone, _ = unpack_index(payload_of(1, [(500, NO_REPLICAS)], 9))
    assert slices.part_bytes(alone, 12345, Rank(1)) == 12345


def test_what_a_rank_says_of_its_replicas_is_equal_if_they_are() -> None:
    told = [slices.replicated(part.head, Rank(r)) for r, part in enumerate(map(cut, whole_three()))]
    assert {each.digest for (each,) in told} == {told[0][0].digest}
    assert [list(ranks_in(each.replicas)) for (each,) in told] == [list(ALL)] * 3
    other = payload_of(2, [(500, 0), (700, 0)], 9)
    other[-1] ^= 1
    (changed,) = slices.replicated(cut(shard_of(2, other)).head, Rank(2))
    assert changed.digest != told[2][0].digest


def whole_three() -> list[Shard]:
    return [shard_of(rank, payload_of(rank, [(500, 0), (700, 0)], 9)) for rank in ALL]


def test_one_different_bit_on_one_replica_is_named() -> None:
    payload = payload_of(1, [(500, 0), (700, 0)], 9)
    payload[-400] ^= 1  # in the slice of rank 1
    parts = three([(500, 0), (700, 0)])
    parts[1] = written(cut(shard_of(1, payload)), 1)
    why = slices.differing({rank: slices.head_of(parts[rank].payload) for rank in ALL})
    assert why is not None
    assert "tensor 1 of 'model' is not the same on ranks 0 and 1" in why
    joined = slices.join(parts[0], parts.__getitem__)
    with pytest.raises(ShardBad, match="rank 0 with the slices of ranks 1, 2 is damaged"):
        joined.verify()


def test_a_slice_that_was_damaged_before_it_was_written_changes_the_digest_of_all_who_join_it() -> (
    None
):
    shards = [shard_of(rank, payload_of(rank, [(30_000, 0)], 9)) for rank in ALL]
    saved = [digest_of(shard.payload) for shard in shards]
    parts = [written(cut(shard), rank) for rank, shard in enumerate(shards)]
    joined = [slices.join(part, parts.__getitem__).payload for part in parts]
    assert list(map(digest_of, joined)) == saved
    shards[1].payload[-15_000] ^= 1  # in the slice of rank 1
    parts[1] = written(cut(shards[1]), 1)
    joined = [slices.join(part, parts.__getitem__).payload for part in parts]
    assert not set(map(digest_of, joined)) & set(saved)


def test_a_replica_that_lacks_a_tensor_or_wrote_all_is_named() -> None:
    parts = three([(500, 0)])
    more = three([(500, 0), (600, 0)])
    heads = {rank: slices.head_of(parts[rank].payload) for rank in ALL}
    why = slices.differing(heads | {Rank(0): slices.head_of(more[0].payload)})
    assert why is not None
    assert "tensor 1 of 'model' is on 1 of the ranks 0, 1, 2" in why
    assert slices.differing({**heads, Rank(2): None}) is not None
    with pytest.raises(ShardBad, match="rank 1 lacks tensor 1 of 'model'"):
        slices.join(more[0], parts.__getitem__)


@pytest.mark.parametrize("at", [0, 9, 17, 40, 4096, 5000])
def test_a_flipped_bit_of_a_part_is_found_or_does_no_harm(at: int) -> None:
    parts = three([(500, 0)])
    whole = [slices.join(parts[rank], parts.__getitem__).payload for rank in ALL]
    parts[1].payload[at] ^= 8
    with pytest.raises(ShardBad, match="rank 1 is damaged"):
        parts[1].verify()
    harmed = 0
    for rank in (0, 2):
        try:
            joined = slices.join(parts[rank], parts.__getitem__)
            joined.verify()
        except ShardBad:
            harmed += 1
        else:
            assert joined.payload == whole[rank]
    assert harmed == (0 if at in (40, 5000) else 2)


# --- on real ranks, through the disk -------------------------------------------------------------

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    forked = Ranks()
    yield forked
    forked.close()


def save_once(layout: str, shm: str, spoil: int) -> Training:
    replicas.SLICED_FROM_BYTES = 1  # the net is tiny
    training = Training(layout)
    training.step()
    if training.replica == spoil:
        training.net.down.bias.data.add_(1)
    ckpt = checkpoint(shm, training.state)
    ckpt.save(STEP)
    ckpt.flush(30)
    return training


def save_and_restore_from_disk(layout: str, shm: str, directory: str, spoil: int) -> None:
    training = save_once(layout, shm, spoil)
    dist.barrier()
    if dist.get_rank() == 0:
        to_disk(Path(shm), tier_at(directory), spoilt=spoil >= 0)
    dist.barrier()
    again = Training(layout, seed=3)
    empty = f"{shm}/of-a-new-machine"
    restored = checkpoint(empty, again.state, restore=STEP, directory=directory)
    assert restored.restore() == STEP + 1
    assert same(again.bits(), training.bits())


def to_disk(shm: Path, tier: Tier, *, spoilt: bool) -> None:
    """As agents and the controller do; a second time, if replicas were none."""
    size = dist.get_world_size()
    step = Published(step=STEP, generation=Generation(1))
    for rank in range(size):
        tier.persist(shm, Rank(rank), STEP)
    if spoilt:
        why = "of 'model' is not the same on ranks 0 and 1.* and the next is written whole"
        with pytest.raises(ShardBad, match=why):
            tier.publish(step, size, keep=2)
        for rank in range(size):
            tier.persist(shm, Rank(rank), STEP)
    tier.publish(step, size, keep=2)


@pytest.mark.parametrize(("layout", "size"), [("ddp", 3), ("hsdp", 4), ("fsdp-tp", 4)])
def test_each_rank_restores_its_state_from_everybodys_slices(
    ranks: Ranks, shm: Path, tmp_path: Path, layout: str, size: int
) -> None:
    ranks.run(size, save_and_restore_from_disk, layout, shm, tmp_path, -1)
    assert not (tmp_path / disk.WHOLE).exists()
    sliced = [slices.head_of(slots_payload(tmp_path, rank)) is not None for rank in range(size)]
    assert all(sliced)
    assert disk.manifest_of(tmp_path, STEP).replicas


def test_a_store_has_the_slices_of_a_directory_and_gives_whole_shards(
    ranks: Ranks, shm: Path, tmp_path: Path
) -> None:
    url = f"local://{tmp_path}"
    ranks.run(3, save_and_restore_from_disk, "ddp", shm, url, -1)
    tier = tier_at(url)
    assert tier.manifest(STEP).replicas == (ALL,)
    for rank in ALL:
        written = memoryview(slots.map_private(tmp_path / f"step-{STEP}/gen-1/rank-{rank}.shard"))
        assert slices.head_of(written[4096:]) is not None
        assert slices.head_of(tier.read(Expected(step=STEP, rank=rank)).payload) is None
    assert not (tmp_path / disk.WHOLE).exists()


def test_replicas_that_are_none_are_found_out_in_a_store_too(
    ranks: Ranks, shm: Path, tmp_path: Path
) -> None:
    url = f"local://{tmp_path}"
    ranks.run(2, save_and_restore_from_disk, "ddp", shm, url, 1)
    assert "'model' is not the same" in (tmp_path / disk.WHOLE).read_text()
    tier = tier_at(url)
    assert tier.manifest(STEP).replicas == ()
    for rank in range(2):
        tier.read(Expected(step=STEP, rank=Rank(rank))).verify()


def slots_payload(directory: Path, rank: int) -> memoryview:
    path = disk.shard_path(directory, STEP, Rank(rank))
    return memoryview(slots.map_private(path))[4096:]


def test_replicas_that_are_none_are_found_out_and_written_whole(
    ranks: Ranks, shm: Path, tmp_path: Path
) -> None:
    ranks.run(2, save_and_restore_from_disk, "ddp", shm, tmp_path, 1)
    assert "'model' is not the same" in (tmp_path / disk.WHOLE).read_text()
    assert disk.manifest_of(tmp_path, STEP).replicas == ()
    for rank in range(2):
        disk.read(tmp_path, Expected(step=STEP, rank=Rank(rank))).verify()
