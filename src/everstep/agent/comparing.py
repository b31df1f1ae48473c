"""Whether steps that are done again come to the same losses as before, bit for bit.

For shell.py and effects.py. Before ranks start that shall be compared, what their predecessors came
to is laid aside in shared memory, so that an agent that takes over goes on with it. Once all local
ranks have done the last of those steps, both are compared, and that is said once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from everstep.actions import StartRanks
from everstep.model import NO_STEP, Generation, MachineId, Rank, Seconds, Step, Value
from everstep.sightings import BadNumber, LossesCompared
from everstep.trainer.heartbeat import Heartbeat
from everstep.trainer.recall import STEPS_KEPT, Loss, losses

ATTACH_WITHIN_S: Seconds = 600.0
"""From the start of the ranks: a script that has not attached by then does not report losses."""
LATE_STEPS = 2
"""A loss that comes from the device is known one step later: after two it will not come."""


class Before(Value, frozen=True, kw_only=True):
    """What was laid aside."""

    generation: Generation
    """The one that does the steps again."""
    first: Step
    last: Step
    world_size: int
    losses: dict[Rank, dict[Step, tuple[int, int]]]
    """Of each local rank: generation and bits of each loss."""


class Comparing:
    """Of one machine."""

    def __init__(self, shm: Path, machine: MachineId) -> None:
        self._shm = shm
        self._path = shm / "comparing"
        self._machine = machine
        self._before = self._read()

    def begin(self, order: StartRanks, ranks: Sequence[Rank], world_size: int) -> None:
        """Before these ranks start. OSError if shared memory has no room."""
        self._before = None
        self._path.unlink(missing_ok=True)
        first, last = order.restore + 1, order.compare_through
        if last == NO_STEP or last < first:
            return
        steps = range(max(first, last + 1 - STEPS_KEPT), last + 1)
        kept = {
            rank: {
                Step(step): (loss.generation, loss.bits)
                for step, loss in losses(self._shm, rank, world_size, steps).items()
            }
            for rank in ranks
        }
        self._before = Before(
            generation=order.generation,
            first=Step(first),
            last=last,
            world_size=world_size,
            losses=kept,
        )
        self._path.write_bytes(msgspec.msgpack.encode(self._before))

    def look(
        self, generation: Generation, beats: Sequence[Heartbeat], since_s: Seconds
    ) -> LossesCompared | None:
        """What came of it, once; None: there is nothing to compare, or not yet, or no more.

        `since_s`: how long ago the ranks were started.
        """
        before = self._before
        if before is None or before.generation != generation or len(beats) < len(before.losses):
            return None
        known = any(before.losses.values())
        silent = since_s > ATTACH_WITHIN_S and not any(beat.attached for beat in beats)
        if known and not silent and not all(self._done(before, beat) for beat in beats):
            return None
        self._before = None
        self._path.unlink(missing_ok=True)
        return _compared(self._machine, before, self._again(before))

    def _done(self, before: Before, beat: Heartbeat) -> bool:
        """Whether the rank's loss of the last step is known, or will never be."""
        if not beat.attached or beat.step < before.last:
            return False
        if beat.step >= before.last + LATE_STEPS:
            return True
        found = losses(self._shm, beat.rank, before.world_size, [before.last])
        return before.last in found and found[before.last].generation == before.generation

    def _again(self, before: Before) -> dict[tuple[Step, Rank], Loss]:
        """What was come to now, of what was known before."""
        return {
            (Step(step), rank): loss
            for rank, kept in before.losses.items()
            for step, loss in losses(self._shm, rank, before.world_size, list(kept)).items()
            if loss.generation == before.generation
        }

    def _read(self) -> Before | None:
        """What a former agent laid aside."""
        try:
            return msgspec.msgpack.decode(self._path.read_bytes(), type=Before)
        except (OSError, msgspec.MsgspecError):
            return None


def _compared(
    machine: MachineId, before: Before, again: dict[tuple[Step, Rank], Loss]
) -> LossesCompared:
    former = {
        (step, rank): Loss(*kept)
        for rank, steps in before.losses.items()
        for step, kept in steps.items()
    }
    other = sorted(key for key, loss in again.items() if loss.bits != former[key].bits)
    first = other[0] if other else None
    return LossesCompared(
        machine=machine,
        generation=before.generation,
        first=before.first,
        last=before.last,
        compared=len(again),
        differs=None if first is None else BadNumber(rank=first[1], step=first[0]),
        before=None if first is None else former[first].value,
        after=None if first is None else again[first].value,
    )
