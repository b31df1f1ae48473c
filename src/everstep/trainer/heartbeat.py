"""The heartbeat slot: 128 bytes per local rank in a shared mapping, written without a system call.

The rank's process writes its slot (its identity by agent/rank_main.py right after the fork, its
steps by trainer/), the agent of its machine reads it. The slot outlives rank, launcher and agent,
so a restarted agent learns from it which processes to adopt.

seqlock.py keeps readers from acting on half a record. One word lies outside of that, since it
changes many times per step: the time since when the rank communicates.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from pathlib import Path

import msgspec

from everstep.trainer import seqlock

SLOT_BYTES = 128
MAGIC = 0x31535645  # "EVS1"
_BODY = struct.Struct("<IIqiiQqIIQddddQd")
_COMMUNICATING_AT = SLOT_BYTES - 16
assert seqlock.BODY_AT + _BODY.size <= _COMMUNICATING_AT


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
    if not seqlock.is_whole(slot):
        return None
    fields = _BODY.unpack_from(slot, seqlock.BODY_AT)
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
    """The one writer of one slot.

    Whatever was left by a former writer, this one does not communicate yet.
    """

    def __init__(self, path: Path, index: int) -> None:
        self._entry = seqlock.Writer(path, index, SLOT_BYTES)
        self.communicate(0)

    def communicate(self, since_ns: int) -> None:
        """Since when the rank communicates, by CLOCK_MONOTONIC; 0: it does not."""
        self._entry.store(_COMMUNICATING_AT, since_ns)

    def write(self, beat: Heartbeat) -> None:
        self._entry.write(pack(beat))

    def close(self) -> None:
        self._entry.close()


class SlotReader(seqlock.Reader[Heartbeat]):
    """Reads all slots of one machine."""

    def __init__(self, path: Path, count: int) -> None:
        super().__init__(path, count, SLOT_BYTES, unpack)

    def communicating_since(self) -> list[int]:
        """Of each slot, CLOCK_MONOTONIC in nanoseconds; 0 of ranks that do not communicate, or do
        not say so. Any thread may ask.
        """
        return self.words(_COMMUNICATING_AT)
