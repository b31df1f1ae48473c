"""Brings this machine's shards of one step to disk: pin, wait until it is saved, copy, release.

Used by the shell for PersistShards; one step at a time, the copying in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib

from everstep.actions import PersistStep
from everstep.agent.saved import Saves
from everstep.agent.this_machine import ThisMachine
from everstep.checkpoint.pins import pin_for_disk
from everstep.checkpoint.tier import tier_at
from everstep.events import PersistFailed, StepPersisted
from everstep.model import EverstepError, Rank, Step


class NotPersisted(EverstepError):
    """The shards are not on disk; the message says why."""


class Persisting:
    """The disk tier's part on this machine."""

    def __init__(self, here: ThisMachine, saves: Saves) -> None:
        self._here = here
        self._saves = saves
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
        self._pin(ranks, order.step)
        tier = await asyncio.to_thread(tier_at, self._here.spec.checkpoint.directory)
        for rank in ranks:
            await self._saves.wait(rank, order.step, order.generation)
            await asyncio.to_thread(tier.persist, self._here.shm, rank, order.step)

    def _pin(self, ranks: list[Rank], step: Step | None) -> None:
        """Without its memory the step cannot be kept, and then it is missing below."""
        for rank in ranks:
            with contextlib.suppress(OSError):
                pin_for_disk(self._here.shm, rank, step)
