"""Waits until this machine's ranks have saved a step: for the disk tier and for the backups.

The ranks may be alive (then the step may still be to come) or dead (then it is there or never will
be). Slots are looked at, never written; keeping them is the caller's matter (checkpoint/pins.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from everstep.checkpoint import slots
from everstep.model import EverstepError, Generation, Rank, Seconds, Step

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
