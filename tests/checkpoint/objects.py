"""Stateful objects for tests, and a way through a shard and back without a copy thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from everstep.checkpoint.capture import Capture, Snapshot, Stateful, views_of
from everstep.checkpoint.digest import digest_of
from everstep.checkpoint.format import Header, Shard
from everstep.checkpoint.guard import Guard
from everstep.checkpoint.load import Loader
from everstep.model import Generation, Rank, Step

torch.set_num_threads(1)
"""Ranks that share a machine have one each, and forked ranks must not inherit a pool of them."""
DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype)
        and not str(value).startswith(("torch.q", "torch.bits", "torch.bit", "torch.complex32"))
    },
    key=str,
)
"""All element types of this torch but the quantized ones."""


class Box:
    """An object whose state is whatever it was given; loading replaces it."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


def snapshot_of(state: Mapping[str, Stateful]) -> Snapshot:
    return Capture(state, Guard(state, explicit_wait=False)).snapshot(Step(5))


def shard_of(snapshot: Snapshot) -> Shard:
    """The shard that the copy thread would make of the snapshot."""
    payload = memoryview(bytearray(snapshot.payload_bytes))
    payload[: len(snapshot.head)] = snapshot.head
    targets = views_of(payload[len(snapshot.head) :], snapshot.tensors)
    torch._foreach_copy_(targets, snapshot.sources)
    header = Header(
        step=snapshot.step,
        generation=Generation(1),
        rank=Rank(0),
        world_size=1,
        sequence=1,
        payload_bytes=len(payload),
        digest=digest_of(payload),
    )
    return Shard(header, None, payload, "a test")


def through_a_shard(value: Any) -> Any:
    """What comes back of an object's state."""
    shard = shard_of(snapshot_of({"it": Box(value)}))
    box = Box()
    Loader(shard).load({"it": box})
    return box.value


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in type, shape, strides and every bit (NaN equals NaN)."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    raw = [torch.empty_strided(t.shape, _row_major(t), dtype=t.dtype) for t in (one, other)]
    for target, source in zip(raw, (one, other), strict=True):
        target.copy_(source)
    left, right = (t.reshape(-1).view(torch.uint8) for t in raw)
    return torch.equal(left, right)


def _row_major(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(torch.empty(tensor.shape).stride())


def of_dtype(dtype: torch.dtype) -> torch.Tensor:
    """Six elements that differ."""
    size = 6 * dtype.itemsize
    raw = torch.arange(1, size + 1, dtype=torch.uint8)
    return (raw % 2 if dtype == torch.bool else raw).view(dtype)
