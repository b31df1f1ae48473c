"""The heartbeat slot: 128 bytes per local rank in a shared mapping, written without a system call.

The rank's process writes its slot (its identity by agent/rank_main.py right after the fork, its
steps by trainer/), the agent of its machine reads it. The slot outlives rank, launcher and agent,
so a restarted agent learns from it which processes to adopt.

A seqlock keeps readers from acting on half a record: the writer makes the number at the front odd,
writes the body, then writes the even number at the back and at the front. A reader that sees two
different or odd numbers has read a torn record and keeps the value it had. A writer killed in the
middle leaves the slot torn for ever, which is right: its last whole value is the truth about it.

One word lies outside of that, since it changes many times per step: the time since when the rank
communicates. A word is stored at once.
"""

from __future__ import annotations

import mmap
import os
import struct
from enum import IntEnum
from pathlib import Path

import msgspec

SLOT_BYTES = 128
MAGIC = 0x31535645  # "EVS1"
_FRONT = struct.Struct("Q")  # native: one machine word, so never half of a number
_BODY = struct.Struct("<IIqiiQqIIQddddQd")
_BODY_AT = 8
_BACK_AT = SLOT_BYTES - 8
_COMMUNICATING_AT = _BACK_AT - 8
assert _BODY_AT + _BODY.size <= _COMMUNICATING_AT


class Phase(IntEnum):
    """What a rank is doing, as far as it said so."""

    STARTING = 0
    TRAINING = 1
    RESTORING = 2
    ENDED = 3


class Heartbeat(msgspec.Struct, kw_only=True):
    """One decoded slot. Unknown numbers are NaN, unknown steps -1."""

    generation: int
    rank: int
    pid: int
    start_ticks: int
    """Field 22 of /proc/PID/stat: with the pid it names one process for ever."""
    step: int = -1
    """Newest step whose optimizer update this rank finished."""
    phase: int = Phase.STARTING
    attached: bool = False
    """Whether the script called everstep.attach(): without it there are no steps to see."""
    at_ns: int = 0
    """CLOCK_MONOTONIC when `step` was finished (one clock for all processes of a host)."""
    loss: float = float("nan")
    grad_norm: float = float("nan")
    step_s: float = float("nan")
    """Duration of the newest step."""
    tokens_per_s: float = float("nan")
    saved_step: int = -1
    """Newest step whose slot in shared memory is committed."""
    flops_per_s: float = float("nan")
    differs_step: int = -1
    """First step that came to another loss than when it was done before (recall.py)."""
    bad_step: int = -1
    """First step of this generation whose loss was not finite."""


def pack(beat: Heartbeat) -> bytes:
    """The slot's body; the sequence numbers around it are SlotWriter's."""
    return _BODY.pack(
        MAGIC,
        beat.bad_step + 1,
        beat.generation,
        beat.rank,
        beat.pid,
        beat.start_ticks,
        beat.step,
        beat.phase,
        (beat.differs_step + 1) << 1 | beat.attached,
        beat.at_ns,
        beat.loss,
        beat.grad_norm,
        beat.step_s,
        beat.tokens_per_s,
        beat.saved_step + 1,
        beat.flops_per_s,
    )


def unpack(slot: bytes) -> Heartbeat | None:
    """Decode 128 bytes; None if torn, being written, or never written."""
    (front,) = _FRONT.unpack_from(slot, 0)
    (back,) = _FRONT.unpack_from(slot, _BACK_AT)
    if front != back or front % 2 or front == 0:
        return None
    fields = _BODY.unpack_from(slot, _BODY_AT)
    if fields[0] != MAGIC:
        return None
    return Heartbeat(
        generation=fields[2],
        rank=fields[3],
        pid=fields[4],
        start_ticks=fields[5],
        step=fields[6],
        phase=fields[7],
        attached=bool(fields[8] & 1),
        differs_step=(fields[8] >> 1) - 1,
        at_ns=fields[9],
        loss=fields[10],
        grad_norm=fields[11],
        step_s=fields[12],
        tokens_per_s=fields[13],
        saved_step=fields[14] - 1,
        flops_per_s=fields[15],
        bad_step=fields[1] - 1,
    )


class SlotWriter:
    """The one writer of one slot. Creating a second one for the same slot continues its numbers.

    Whatever was left by a former writer, this one does not communicate yet.
    """

    def __init__(self, path: Path, index: int) -> None:
        self._map = mapped(path, (index + 1) * SLOT_BYTES)
        self._at = index * SLOT_BYTES
        (front,) = _FRONT.unpack_from(self._map, self._at)
        self._number = front + front % 2
        self.communicate(0)

    def communicate(self, since_ns: int) -> None:
        """Since when the rank communicates, by CLOCK_MONOTONIC; 0: it does not."""
        _FRONT.pack_into(self._map, self._at + _COMMUNICATING_AT, since_ns)

    def write(self, beat: Heartbeat) -> None:
        at, number = self._at, self._number + 2
        _FRONT.pack_into(self._map, at, number - 1)
        self._map[at + _BODY_AT : at + _BODY_AT + _BODY.size] = pack(beat)
        _FRONT.pack_into(self._map, at + _BACK_AT, number)
        _FRONT.pack_into(self._map, at, number)
        self._number = number

    def close(self) -> None:
        self._map.close()


class SlotReader:
    """Reads all slots of one machine; a torn slot reads as the value it had before."""

    def __init__(self, path: Path, count: int) -> None:
        self._map = mapped(path, count * SLOT_BYTES)
        self._last: list[Heartbeat | None] = [None] * count

    def read(self) -> list[Heartbeat | None]:
        """One entry per local rank; None where no rank ever wrote."""
        for index in range(len(self._last)):
            at = index * SLOT_BYTES
            beat = unpack(self._map[at : at + SLOT_BYTES])
            if beat is not None:
                self._last[index] = beat
        return list(self._last)

    def communicating_since(self) -> list[int]:
        """Of each slot, CLOCK_MONOTONIC in nanoseconds; 0 of ranks that do not communicate, or do
        not say so. Any thread may ask.
        """
        return [
            _FRONT.unpack_from(self._map, index * SLOT_BYTES + _COMMUNICATING_AT)[0]
            for index in range(len(self._last))
        ]

    def close(self) -> None:
        self._map.close()


def mapped(path: Path, least: int) -> mmap.mmap:
    """The file, created and extended as needed to at least so many bytes, as memory.

    Pages are reserved, so no later SIGBUS.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = max(least, os.fstat(fd).st_size)
        os.posix_fallocate(fd, 0, size)
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)
