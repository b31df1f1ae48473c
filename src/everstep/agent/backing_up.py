"""Brings this machine's shards of a backup step to the peers: keep, wait until saved, cut, send.

Of what ranks hold alike each sends its slice only (checkpoint/slices.py), and the controller is
told a digest of all of it. Where these differ, it orders whole shards from then on.

Used by the shell for BackUpShards. The new step and the machine-safe one before it stay pinned on
every rank: until the next order if all is sent, since only the controller knows whether the other
machines' shards are, too. If it fails here, the new step's pin is released and the safe one's not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from everstep.actions import BackUpStep
from everstep.agent.log import say
from everstep.agent.saved import Overwritten, Saves
from everstep.agent.this_machine import ThisMachine
from everstep.agent.threads import Crew
from everstep.agent.transfer.channel import Cancel
from everstep.agent.transfer.client import Client, Way
from everstep.agent.transfer.messages import Put
from everstep.agent.transfer.pace import TokenBucket, rate_for
from everstep.checkpoint import slices, slots
from everstep.checkpoint.format import Expected, Shard
from everstep.checkpoint.need import in_words
from everstep.checkpoint.pins import pin_for_backup, pins_of
from everstep.checkpoint.slices import Part
from everstep.checkpoint.slots import ShardLost
from everstep.events import BackupFailed, StepBackedUp
from everstep.model import NO_STEP, EverstepError, Peer, Rank, Replicated, Seconds, Step

SENT_WITHIN_S: Seconds = 600.0
"""A backup that takes longer is given up: a peer that slow protects nobody."""


class NotBackedUp(EverstepError):
    """The peers do not hold the step; the message says why."""


class Sent(NamedTuple):
    """What went over."""

    total_bytes: int
    took_s: Seconds
    replicated: tuple[Replicated, ...]


class Load(NamedTuple):
    """What one rank's peer is to keep."""

    peer: Peer
    shard: Shard
    part: Part | None
    """None: the whole shard."""

    @property
    def chunks(self) -> Sequence[memoryview]:
        return [self.shard.payload] if self.part is None else self.part.chunks

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.chunks))

    @property
    def replicated(self) -> tuple[Replicated, ...]:
        part = self.part
        return () if part is None else slices.replicated(part.head, self.shard.header.rank)


class BackingUp:
    """The owner's side of backups on this machine."""

    def __init__(
        self,
        here: ThisMachine,
        saves: Saves,
        client: Client,
        step_s: Callable[[], Seconds | None],
        busy: Callable[[], bool],
    ) -> None:
        """`step_s`: recent time per step, if known; for what people are told. While a rank here is
        `busy` communicating, sending yields, for as long as it is to be spread over and no more.
        """
        self._here = here
        self._saves = saves
        self._client = client
        self._step_s = step_s
        self._busy = busy
        self._crew = Crew(here.setup.nproc_per_node)
        self._maps = slots.Maps()
        self._told_bytes = 0
        self._told_whole = ""

    async def back_up(self, order: BackUpStep) -> StepBackedUp | BackupFailed:
        """The answer to the order. Cancelled: something newer has begun, and has its own pins."""
        machine = self._here.setup.machine
        ranks = [peer.rank for peer in order.peers]
        try:
            self._pin(ranks, order.step, order.safe)
            slots.forget_others(self._here.shm, ranks, order.safe)
            sent = await self._back_up(order)
        except (EverstepError, OSError) as error:
            self._pin(ranks, None, order.safe)
            return BackupFailed(
                machine=machine,
                action=order.id,
                step=order.step,
                reason=str(error),
                late=isinstance(error, Overwritten),
            )
        return StepBackedUp(
            machine=machine,
            action=order.id,
            step=order.step,
            sent_bytes=sent.total_bytes,
            took_s=sent.took_s,
            replicated=sent.replicated,
        )

    def keep_restored(self, ranks: list[Rank], step: Step) -> None:
        """Before ranks start: what is kept for backups here, if it is not what was kept before.

        On a machine that just got its shards, the restored step is the only one that a peer holds.
        On others it may be one that was kept for a backup which failed: newcomers fetch slices of
        it from here.
        """
        for rank in ranks:
            held = {copy.step for copy in slots.inventory(self._here.shm, [rank])}
            pins = pins_of(self._here.shm, rank)
            safe = pins.safe if pins.safe in held else step
            backup = pins.backup if pins.backup in held else step if step in held else None
            pin_for_backup(self._here.shm, rank, backup, safe if safe != NO_STEP else None)

    def close(self) -> None:
        self._crew.close()

    async def _back_up(self, order: BackUpStep) -> Sent:
        if not order.peers:
            raise NotBackedUp("no rank was ever started on this machine")
        for peer in order.peers:
            await self._saves.wait(peer.rank, order.step, order.generation)
        within_s = SENT_WITHIN_S + order.spread_s
        try:
            async with asyncio.timeout(within_s):
                loads = await self._crew.all(
                    [partial(self._load, order, peer) for peer in order.peers], Cancel()
                )
                self._tell_need(order, loads)
                cancel = Cancel()
                way = Way(cancel, self._pace(order, loads))
                began = time.monotonic()
                counts = await self._crew.all(
                    [partial(self._send, order, load, way) for load in loads], cancel
                )
        except TimeoutError:
            raise NotBackedUp(
                f"the peers did not take step {order.step} within {within_s:g} s"
            ) from None
        replicated = tuple(each for load in loads for each in load.replicated)
        return Sent(sum(counts), time.monotonic() - began, replicated)

    def _pace(self, order: BackUpStep, loads: Sequence[Load]) -> TokenBucket:
        """The bytes of this backup over the time that the controller gives it."""
        total = sum(load.nbytes for load in loads)
        most = self._here.spec.checkpoint.backup_bytes_per_s
        return TokenBucket(rate_for(total, order.spread_s, most), self._busy, order.spread_s)

    def _load(self, order: BackUpStep, peer: Peer) -> Load:
        """Find the rank's shard, and cut it where there are replicas."""
        expected = Expected(step=order.step, rank=peer.rank, generation=order.generation)
        shard = slots.find(self._here.shm, expected, self._maps.map)
        part = None if order.whole else slices.try_cut(shard, with_crc=False)
        if not slots.unchanged(self._here.shm, shard.header):
            raise ShardLost(f"step {order.step} was overwritten before it was sent")
        return Load(peer, shard, part)

    def _send(self, order: BackUpStep, load: Load, way: Way) -> int:
        header = load.shard.header
        wanted = Put(
            header=replace(header, payload_bytes=load.nbytes),
            safe=order.safe,
            order_generation=order.generation,
        )
        shm = self._here.shm
        return self._client.put(
            load.peer, wanted, load.chunks, lambda: slots.unchanged(shm, header), way
        )

    def _pin(self, ranks: list[Rank], step: Step | None, safe: Step) -> None:
        for rank in ranks:
            pin_for_backup(self._here.shm, rank, step, safe if safe != NO_STEP else None)

    def _tell_need(self, order: BackUpStep, loads: Sequence[Load]) -> None:
        """How much network backups need here: at the first one, and when that has changed."""
        if order.whole and order.whole != self._told_whole:
            self._told_whole = order.whole
            say(f"shards are sent whole to peers from now on: {order.whole}")
        size = sum(load.nbytes for load in loads)
        if size == self._told_bytes:
            return
        self._told_bytes = size
        spec, step_s = self._here.spec.checkpoint, self._step_s()
        text = f"each backup sends {in_words(size)} from this machine"
        whole = sum(load.shard.header.payload_bytes for load in loads)
        if any(load.part for load in loads):
            text += f" (of {in_words(whole)}: what ranks hold alike goes once)"
        if step_s:
            needed = size / (step_s * max(1, spec.backup_every))
            text += (
                f"; one every {spec.backup_every} steps of {step_s:.3f} s takes"
                f" {in_words(needed)}/s"
            )
            if 0 < spec.backup_bytes_per_s < needed:
                text += (
                    f", but {in_words(spec.backup_bytes_per_s)}/s are allowed:"
                    " there will be fewer backups"
                )
        say(text)
