"""Waits until this machine's ranks have saved a step: for the disk tier, for backups, for a stop.

The ranks may be alive (then the step may still be to come) or dead (then it is there or never will
be). Slots are looked at, never written; keeping them is the caller's matter (checkpoint/pins.py).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from everstep.checkpoint import slots
from everstep.model import EverstepError, Generation, Rank, Seconds, Step
from everstep.trainer.heartbeat import Heartbeat

LOOK_EVERY_S: Seconds = 0.02
SAVED_WITHIN_S: Seconds = 600.0
"""A step that no rank saves within this time is given up: training stands still, or skips saves."""


class NotSaved(EverstepError):
    """The step will not be in this rank's memory; the message says why."""


class Overwritten(NotSaved):
    """It was there, and whoever wants to keep it came too late."""


class Saves:
    """What the ranks of this machine save."""

    def __init__(self, shm: Path, any_rank_runs: Callable[[], bool]) -> None:
        self._shm = shm
        self._any_rank_runs = any_rank_runs

    async def wait(self, rank: Rank, step: Step, generation: Generation) -> None:
        """Return when the rank's slot of this step, of this generation, is complete.

        Raises NotSaved if that is not to be expected any more.
        """
        deadline = asyncio.get_running_loop().time() + SAVED_WITHIN_S
        while True:
            last = not self._any_rank_runs()
            held = [
                copy.step
                for copy in slots.inventory(self._shm, [rank])
                if copy.generation == generation
            ]
            if step in held:
                return
            if max(held, default=-1) > step:
                raise Overwritten(f"rank {rank} has overwritten its copy of step {step}")
            if last:
                raise NotSaved(f"rank {rank} ended before it saved step {step}")
            if asyncio.get_running_loop().time() > deadline:
                raise NotSaved(f"rank {rank} did not save step {step} within {SAVED_WITHIN_S:g} s")
            await asyncio.sleep(LOOK_EVERY_S)

    async def caught_up(self, beats: Sequence[Heartbeat], within_s: Seconds) -> None:
        """Return when each of these ranks has saved the step that its slot says it has finished, or
        one after it; or after this time. A rank that does not save so often is not waited for.
        """
        deadline = asyncio.get_running_loop().time() + within_s
        while any(self._still_saves(beat) for beat in beats):
            if asyncio.get_running_loop().time() > deadline or not self._any_rank_runs():
                return
            await asyncio.sleep(LOOK_EVERY_S)

    def _still_saves(self, beat: Heartbeat) -> bool:
        saved = [
            copy.step
            for copy in slots.inventory(self._shm, [Rank(beat.rank)])
            if copy.generation == beat.generation
        ]
        return next_save(saved) <= beat.step


def next_save(saved: Sequence[Step]) -> int:
    """The step that is saved next by a rank that holds copies of these, in order. One that has
    saved nothing may never do.
    """
    if not saved:
        return sys.maxsize
    apart = saved[-1] - saved[-2] if len(saved) > 1 else 1
    return saved[-1] + apart
