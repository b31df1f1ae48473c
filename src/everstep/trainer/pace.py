"""What a rank says of itself beside its heartbeat: 64 bytes per local rank in the file "paces".

The rank writes what it does and since when, and how long it computed in its newest step
(phases.py); the agent of its machine reads it (agent/progress.py). It is a file of its own, so that
a rank or an agent that does not know it goes on as before: what nobody wrote reads as not known.
seqlock.py keeps half a record from being read.
"""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec

from everstep.model import RankPhase
from everstep.trainer import seqlock

FILE = "paces"
"""Its name, in the machine's shared memory."""
PACE_BYTES = 64
_MAGIC = 0x31505645  # "EVP1"
_BODY = struct.Struct("<IIQqqdd")
assert _BODY.size + seqlock.EDGES_BYTES <= PACE_BYTES

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
    if not seqlock.is_whole(entry):
        return None
    magic, phase, generation, since_ns, step, compute_s, wall_s = _BODY.unpack_from(
        entry, seqlock.BODY_AT
    )
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
    """The one writer of one entry. Not for several threads at once: phases.py has a lock."""

    def __init__(self, path: Path, index: int) -> None:
        self._entry = seqlock.Writer(path, index, PACE_BYTES)

    def write(self, pace: Pace) -> None:
        self._entry.write(
            _BODY.pack(
                _MAGIC,
                _NUMBER[pace.phase],
                pace.generation,
                pace.since_ns,
                pace.step,
                pace.compute_s,
                pace.wall_s,
            )
        )

    def close(self) -> None:
        self._entry.close()


class PaceReader(seqlock.Reader[Pace]):
    """Reads all entries of one machine."""

    def __init__(self, path: Path, count: int) -> None:
        super().__init__(path, count, PACE_BYTES, unpack)
