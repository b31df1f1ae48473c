"""Brings this machine's shards of one step to disk: pin, wait until it is saved, copy, release.

Used by the shell for PersistShards; one step at a time, the copying in a thread. The ranks may be
alive (then the step may still be to come) or dead (then it is there or never will be).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from everstep.actions import PersistStep
from everstep.agent.this_machine import ThisMachine
from everstep.checkpoint import disk, slots
from everstep.events import PersistFailed, StepPersisted
from everstep.model import EverstepError, Rank, Seconds, Step

LOOK_EVERY_S: Seconds = 0.02
SAVED_WITHIN_S: Seconds = 600.0
"""A step that no rank saves within this time is given up: training stands still, or skips saves."""


class NotPersisted(EverstepError):
    """The shards are not on disk; the message says why."""


class Persisting:
    """The disk tier's part on this machine."""

    def __init__(self, here: ThisMachine, any_rank_runs: Callable[[], bool]) -> None:
        self._here = here
        self._any_rank_runs = any_rank_runs
        self._busy = asyncio.Lock()

    async def persist(self, order: PersistStep, ranks: list[Rank]) -> StepPersisted | PersistFailed:
        """The answer to the order."""
        machine = self._here.setup.machine
        async with self._busy:
            try:
                await self._persist(order, ranks)
            except (EverstepError, OSError) as error:
                return PersistFailed(
                    machine=machine, action=order.id, step=order.step, reason=str(error)
                )
            finally:
                self._pin(ranks, None)
        return StepPersisted(machine=machine, action=order.id, step=order.step)

    async def _persist(self, order: PersistStep, ranks: list[Rank]) -> None:
        if not ranks:
            raise NotPersisted("no rank was ever started on this machine")
        directory = Path(self._here.spec.checkpoint.directory)
        self._pin(ranks, order.step)
        deadline = asyncio.get_running_loop().time() + SAVED_WITHIN_S
        for rank in ranks:
            await self._saved(order, rank, deadline)
            await asyncio.to_thread(disk.persist, self._here.shm, rank, order.step, directory)

    def _pin(self, ranks: list[Rank], step: Step | None) -> None:
        """Without its memory the step cannot be kept, and then it is missing below."""
        for rank in ranks:
            with contextlib.suppress(OSError):
                slots.request_pin(self._here.shm, rank, step)

    async def _saved(self, order: PersistStep, rank: Rank, deadline: float) -> None:
        """Wait until the rank's slot of this step, of this generation, is complete."""
        while True:
            last = not self._any_rank_runs()
            held = [
                copy.step
                for copy in slots.inventory(self._here.shm, [rank])
                if copy.generation == order.generation
            ]
            if order.step in held:
                return
            if max(held, default=-1) > order.step:
                raise NotPersisted(f"rank {rank} has overwritten its copy of step {order.step}")
            if last:
                raise NotPersisted(f"rank {rank} ended before it saved step {order.step}")
            if asyncio.get_running_loop().time() > deadline:
                raise NotPersisted(
                    f"rank {rank} did not save step {order.step} within {SAVED_WITHIN_S:g} s"
                )
            await asyncio.sleep(LOOK_EVERY_S)
