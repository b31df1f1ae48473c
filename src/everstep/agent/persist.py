"""Brings this machine's shards of one step to a disk: pin, wait until it is saved, copy, release.

Used by the shell for PersistShards; one order at a time, the copying in a thread. If one step is to
go to the machine's own disk and to what all machines share, it is kept until it is on both.
"""

from __future__ import annotations

import asyncio
import contextlib

from everstep.actions import PersistStep
from everstep.agent.log import say
from everstep.agent.own_disk import OwnDisk
from everstep.agent.saved import Saves
from everstep.agent.this_machine import ThisMachine
from everstep.checkpoint.pins import pin_for_disk
from everstep.checkpoint.tier import tier_at
from everstep.events import PersistFailed, StepPersisted
from everstep.model import EverstepError, Rank, Step


class NotPersisted(EverstepError):
    """The shards are not on disk; the message says why."""


class Persisting:
    """The disk tiers' part on this machine."""

    def __init__(self, here: ThisMachine, saves: Saves, own_disk: OwnDisk) -> None:
        self._here = here
        self._saves = saves
        self._own_disk = own_disk
        self._busy = asyncio.Lock()
        self._orders: list[PersistStep] = []
        """Not carried out yet. The controller gives several at once for one step only."""

    async def persist(self, order: PersistStep, ranks: list[Rank]) -> StepPersisted | PersistFailed:
        """The answer to the order."""
        machine = self._here.setup.machine
        self._orders.append(order)
        try:
            async with self._busy:
                await self._persist(order, ranks)
        except (EverstepError, OSError) as error:
            say(f"step {order.step} did not get to disk: {error}")
            return PersistFailed(
                machine=machine, action=order.id, step=order.step, reason=str(error)
            )
        finally:
            self._orders.remove(order)
            self._pin(ranks, self._orders[0].step if self._orders else None)
        return StepPersisted(machine=machine, action=order.id, step=order.step)

    async def _persist(self, order: PersistStep, ranks: list[Rank]) -> None:
        if not ranks:
            raise NotPersisted("no rank was ever started on this machine")
        self._pin(ranks, order.step)
        if order.local_disk:
            await self._to_own_disk(order, ranks)
            return
        tier = await asyncio.to_thread(tier_at, self._here.spec.checkpoint.directory)
        for rank in ranks:
            await self._saves.wait(rank, order.step, order.generation)
            await asyncio.to_thread(tier.persist, self._here.shm, rank, order.step)

    async def _to_own_disk(self, order: PersistStep, ranks: list[Rank]) -> None:
        """Older steps make room first: with the one that is safe there are never more than two."""
        await self._own_disk.keep((order.safe, order.step))
        for rank in ranks:
            await self._saves.wait(rank, order.step, order.generation)
            await self._own_disk.persist(rank, order.step)

    def _pin(self, ranks: list[Rank], step: Step | None) -> None:
        """Without its memory the step cannot be kept, and then it is missing below."""
        for rank in ranks:
            with contextlib.suppress(OSError):
                pin_for_disk(self._here.shm, rank, step)
