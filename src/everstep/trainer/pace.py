"""What a rank says of itself beside its heartbeat: 64 bytes per local rank in the file "paces".

The rank writes what it does and since when, and how long it computed in its newest step
(phases.py); the agent of its machine reads it (agent/progress.py). It is a file of its own, so that
a rank or an agent that does not know it goes on as before: what nobody wrote reads as not known.
A seqlock keeps half a record from being read, as in heartbeat.py.
"""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec

from everstep.model import RankPhase
from everstep.trainer.heartbeat import mapped

FILE = "paces"
"""Its name, in the machine's shared memory."""
PACE_BYTES = 64
_MAGIC = 0x31505645  # "EVP1"
_EDGE = struct.Struct("Q")
_BODY = struct.Struct("<IIQqqdd")
_BODY_AT = _EDGE.size
_BACK_AT = PACE_BYTES - _EDGE.size
assert _BODY_AT + _BODY.size <= _BACK_AT

_PHASES = (
    RankPhase.STARTING,
    RankPhase.TRAINING,
    RankPhase.RESTORING,
    RankPhase.ENDED,
    RankPhase.EVALUATING,
    RankPhase.SAVING,
    RankPhase.COMPILING,
)
"""By their numbers in the file: only ever added to."""
_NUMBER = {phase: number for number, phase in enumerate(_PHASES)}


class Pace(msgspec.Struct, kw_only=True):
    """One decoded entry. Unknown numbers are NaN, unknown steps -1."""

    generation: int
    phase: RankPhase = RankPhase.STARTING
    since_ns: int = 0
    """CLOCK_MONOTONIC when the phase began."""
    step: int = -1
    """Newest step that this rank finished."""
    compute_s: float = float("nan")
    """How long it computed in that step, without waits for others (compute.py)."""
    wall_s: float = float("nan")
    """How long that step took, without evaluations and the like."""


def unpack(entry: bytes) -> Pace | None:
    """Decode 64 bytes; None if torn, being written, or never written."""
    (front,) = _EDGE.unpack_from(entry, 0)
    (back,) = _EDGE.unpack_from(entry, _BACK_AT)
    if front != back or front % 2 or front == 0:
        return None
    magic, phase, generation, since_ns, step, compute_s, wall_s = _BODY.unpack_from(entry, _BODY_AT)
    if magic != _MAGIC:
        return None
    return Pace(
        generation=generation,
        phase=_PHASES[phase] if phase < len(_PHASES) else RankPhase.TRAINING,  # of a later version
        since_ns=since_ns,
        step=step,
        compute_s=compute_s,
        wall_s=wall_s,
    )


class PaceWriter:
    """The one writer of one entry. Creating a second one for the same entry continues its numbers.

    Not for several threads at once: phases.py has a lock.
    """

    def __init__(self, path: Path, index: int) -> None:
        self._map = mapped(path, (index + 1) * PACE_BYTES)
        self._at = index * PACE_BYTES
        (front,) = _EDGE.unpack_from(self._map, self._at)
        self._number = front + front % 2

    def write(self, pace: Pace) -> None:
        at, number = self._at, self._number + 2
        _EDGE.pack_into(self._map, at, number - 1)
        _BODY.pack_into(
            self._map,
            at + _BODY_AT,
            _MAGIC,
            _NUMBER[pace.phase],
            pace.generation,
            pace.since_ns,
            pace.step,
            pace.compute_s,
            pace.wall_s,
        )
        _EDGE.pack_into(self._map, at + _BACK_AT, number)
        _EDGE.pack_into(self._map, at, number)
        self._number = number

    def close(self) -> None:
        self._map.close()


class PaceReader:
    """Reads all entries of one machine; a torn one reads as the value it had before."""

    def __init__(self, path: Path, count: int) -> None:
        self._map = mapped(path, count * PACE_BYTES)
        self._last: list[Pace | None] = [None] * count

    def read(self) -> list[Pace | None]:
        """One for each local rank; None where no rank ever wrote."""
        for index in range(len(self._last)):
            at = index * PACE_BYTES
            pace = unpack(self._map[at : at + PACE_BYTES])
            if pace is not None:
                self._last[index] = pace
        return list(self._last)

    def close(self) -> None:
        self._map.close()
