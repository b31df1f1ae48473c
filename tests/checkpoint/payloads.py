"""Payloads as ranks save them, made without torch."""

from __future__ import annotations

import random

from everstep.checkpoint.format import (
    NO_REPLICAS,
    ShardIndex,
    StateEntry,
    TensorEntry,
    pack_index,
    padded,
)
from everstep.model import Rank

ALL = (Rank(0), Rank(1), Rank(2))


def payload_of(
    rank: int, sizes: list[tuple[int, int]], own: int, replicas: tuple[Rank, ...] = ALL
) -> memoryview:
    """A payload of replicated tensors and others, at places that no other rank has them at.

    `sizes`: bytes of each tensor, and whether it is replicated on all ranks (0) or on none.
    `own`: bytes of another one that no other rank has.
    """
    at = 0
    tensors, content = [], bytearray()
    for number, (size, kind) in enumerate([(own, NO_REPLICAS), *sizes]):
        at = padded(len(content))
        content += bytes(at - len(content))
        seed = f"{number}" if kind == 0 else f"{number} of {rank}"
        content += random.Random(seed).randbytes(size)
        entry = TensorEntry(
            dtype="uint8",
            shape=(size,),
            stride=(1,),
            offset=at,
            nbytes=size,
            device="cpu",
            replicas=kind,
        )
        tensors.append(entry)
    entries = (
        StateEntry(name="loader", skeleton=b"l" * (rank * 3000), first=0),
        StateEntry(name="model", skeleton=b"m", first=1),
    )
    index = ShardIndex(entries=entries, tensors=tuple(tensors), replicas=(replicas,))
    return memoryview(bytearray(pack_index(index) + content))
