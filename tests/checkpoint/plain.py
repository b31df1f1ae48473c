"""Shards made of plain bytes: what they must hold follows from rank, step and generation."""

from __future__ import annotations

import hashlib
import random
import struct
from functools import cache
from pathlib import Path

from everstep.checkpoint import slots
from everstep.checkpoint.format import PAGE, Expected, Shard
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
    shards.commit(slot, digest(payload))
    return slot


def digest(payload: bytes) -> int:
    """What digest.py defines, in plain Python: forked writers need no torch for it."""
    pages = [payload[at : at + PAGE].ljust(PAGE, b"\0") for at in range(0, len(payload) + 1, PAGE)]
    sums = b"".join(struct.pack("<Q", _sum_of(page)) for page in pages)
    hashed = hashlib.blake2b(sums, digest_size=8, salt=struct.pack("<Q", len(payload)))
    return int.from_bytes(hashed.digest(), "little")


@cache
def _sum_of(page: bytes) -> int:
    words: tuple[int, ...] = struct.unpack("<512Q", page)
    return sum(words) % (1 << 64)


def check(shm: Path, copy: Copy) -> Shard:
    """The copy holds what this save wrote, to the last byte."""
    expected = Expected(step=copy.step, rank=copy.rank, generation=copy.generation)
    shard = slots.find(shm, expected)
    assert shard.header.digest == digest(bytes(shard.payload))
    assert shard.payload == content(copy.rank, copy.step, copy.generation)
    return shard


def held_steps(shm: Path, rank: int = 0) -> list[int]:
    return [copy.step for copy in slots.inventory(shm, [Rank(rank)])]
