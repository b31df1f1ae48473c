"""Fetches shards from the memory of peers before ranks are forked: a newcomer's way to its state.

Used by the shell for ForkRanks. Each shard goes straight into a slot of its rank, as if the rank
had saved it here, so the rank finds it where it looks first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from everstep.actions import StartRanks
from everstep.agent.log import say
from everstep.agent.this_machine import ThisMachine
from everstep.agent.threads import Crew
from everstep.agent.transfer.channel import Cancel
from everstep.agent.transfer.client import Client, Way
from everstep.agent.transfer.messages import Get
from everstep.checkpoint.format import Header
from everstep.checkpoint.need import in_words
from everstep.checkpoint.slots import OpenSlot, ShardWriter, Writer
from everstep.model import EverstepError, Peer, Seconds


class NotFetched(EverstepError):
    """A shard could not be had from the peer that was to have it; the message says why."""


class Fetching:
    """The receiving side of a restore on this machine."""

    def __init__(self, here: ThisMachine, client: Client) -> None:
        self._here = here
        self._client = client
        self._crew = Crew(here.setup.nproc_per_node)

    async def fetch(self, order: StartRanks, within_s: Seconds) -> None:
        """Bring in what the order says, all at once. Raises NotFetched, OSError; or is cancelled.

        A rank whose slots are being written must not run.
        """
        if not order.fetch:
            return
        cancel = Cancel()
        began = time.monotonic()
        try:
            async with asyncio.timeout(within_s):
                sizes = await self._crew.all(
                    [partial(self._fetch, order, peer, Way(cancel)) for peer in order.fetch],
                    cancel,
                )
        except TimeoutError:
            raise NotFetched(
                f"step {order.restore} could not be fetched from its peers within {within_s:g} s"
            ) from None
        except EverstepError as error:
            raise NotFetched(f"step {order.restore} could not be fetched: {error}") from error
        took_s = time.monotonic() - began
        say(
            f"fetched {len(sizes)} shards of step {order.restore}, {in_words(sum(sizes))}, from"
            f" {_names(order.fetch)} in {took_s:.3f} s"
        )

    async def idle(self) -> None:
        """Wait until no thread of a fetch that was given up writes any more."""
        await self._crew.idle()

    def close(self) -> None:
        self._crew.close()

    def _fetch(self, order: StartRanks, peer: Peer, way: Way) -> int:
        spec = self._here.spec
        writer = ShardWriter(
            self._here.shm,
            Writer(
                rank=peer.rank,
                world_size=spec.world_size,
                generation=order.restore_generation,
                local_ranks=spec.nproc_per_node,
                backups=spec.backs_up,
            ),
        )
        wanted = Get(
            rank=peer.rank,
            step=order.restore,
            generation=order.restore_generation,
            world_size=spec.world_size,
        )
        places: list[OpenSlot] = []

        def place(header: Header) -> memoryview:
            places.append(writer.begin(header.step, header.payload_bytes))
            return places[-1].payload

        fetched = self._client.fetch(peer, wanted, place, way)
        writer.commit(places[-1], fetched.header.digest, fetched.crc)
        return fetched.header.payload_bytes


def _names(peers: Sequence[Peer]) -> str:
    return ", ".join(sorted({peer.machine for peer in peers}))
