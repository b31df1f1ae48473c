"""Shards made of plain bytes: what they must hold follows from rank, step and generation."""

from __future__ import annotations

import random
from pathlib import Path

from everstep.checkpoint import slots
from everstep.checkpoint.format import PAGE, Expected, Shard, crc_of
from everstep.checkpoint.slots import OpenSlot, ShardWriter, Writer
from everstep.model import Copy, Generation, Rank, Step


def content(rank: int, step: int, generation: int) -> bytes:
    """Bytes that no other save has, of a size that changes from step to step.

    Writing them takes as long as everything else in a save, so that kills fall into it.
    """
    pattern = random.Random(f"{rank}/{step}/{generation}").randbytes(4096)
    return pattern * (96 + step % 64)


def writer(shm: Path, rank: int = 0, generation: int = 1, world_size: int = 2) -> ShardWriter:
    who = Writer(rank=Rank(rank), world_size=world_size, generation=Generation(generation))
    return ShardWriter(shm, who)


def save(shards: ShardWriter, rank: int, step: int, generation: int = 1) -> OpenSlot:
    """One whole save, page by page so that a kill may strike in between."""
    payload = content(rank, step, generation)
    slot = shards.begin(Step(step), len(payload))
    for at in range(0, len(payload), PAGE):
        slot.payload[at : at + PAGE] = payload[at : at + PAGE]
    shards.commit(slot)
    shards.seal(slot, crc_of(slot.payload))
    return slot


def check(shm: Path, copy: Copy) -> Shard:
    """The copy holds what this save wrote, to the last byte."""
    expected = Expected(step=copy.step, rank=copy.rank, generation=copy.generation)
    shard = slots.find(shm, expected)
    shard.verify()
    assert shard.payload == content(copy.rank, copy.step, copy.generation)
    return shard


def held_steps(shm: Path, rank: int = 0) -> list[int]:
    return [copy.step for copy in slots.inventory(shm, [Rank(rank)])]
