"""Fetches shards from the memory of peers before ranks are forked: a newcomer's way to its state.

Used by the shell for ForkRanks. Each shard goes into a slot of its rank, as if the rank had saved
it here, so the rank finds it where it looks first. A whole one goes there straight; a part is
joined there with the slices of the other replicas, each of which is asked for its own.
"""

from __future__ import annotations

import asyncio
import mmap
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
from everstep.checkpoint import slices
from everstep.checkpoint.format import Header, Shard
from everstep.checkpoint.need import in_words
from everstep.checkpoint.slots import OpenSlot, ShardWriter, Writer
from everstep.model import EverstepError, Peer, Rank, Seconds


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
            f" {_names((*order.fetch, *order.slices))} in {took_s:.3f} s"
        )

    async def idle(self) -> None:
        """Wait until no thread of a fetch that was given up writes any more."""
        await self._crew.idle()

    def close(self) -> None:
        self._crew.close()

    def _fetch(self, order: StartRanks, peer: Peer, way: Way) -> int:
        """Bring one shard in; the bytes that came."""
        spec = self._here.spec
        writer = ShardWriter(
            self._here.shm,
            Writer(
                rank=peer.rank,
                world_size=self._here.savers_of(order),
                generation=order.restore_generation,
                local_ranks=spec.nproc_per_node,
                backups=spec.backs_up,
            ),
        )
        if any(other.rank == peer.rank for other in order.slices):
            return self._join(order, peer, writer, way)
        places: list[OpenSlot] = []

        def place(header: Header) -> memoryview:
            places.append(writer.begin(header.step, header.payload_bytes))
            return places[-1].payload

        fetched = self._client.fetch(peer, self._wanted(order, peer.rank), place, way)
        writer.commit(places[-1], fetched.header.digest, fetched.crc)
        return fetched.header.payload_bytes

    def _join(self, order: StartRanks, peer: Peer, writer: ShardWriter, way: Way) -> int:
        """Bring one part in, and the slices that it lacks; the bytes that came.

        Whether that makes the shard that was saved, its rank finds out by the digest.
        """
        sources = {other.rank: other for other in order.slices}
        came = 0
        places: list[OpenSlot] = []

        def bring(source: Peer, wanted: Get) -> Shard:
            nonlocal came
            memory = [memoryview(b"")]

            def place(header: Header) -> memoryview:
                memory[0] = memoryview(mmap.mmap(-1, max(1, header.payload_bytes)))
                return memory[0][: header.payload_bytes]

            header, crc = self._client.fetch(source, wanted, place, way)
            came += header.payload_bytes
            where = f"what {source.machine} has of rank {header.rank}"
            return Shard(header, crc, memory[0][: header.payload_bytes], where)

        def open_other(rank: Rank) -> Shard:
            if rank not in sources:
                raise NotFetched(f"nobody was named who has the slices of rank {rank}")
            return bring(sources[rank], self._wanted(order, rank, reader=peer.rank))

        def room(size: int) -> memoryview:
            places.append(writer.begin(order.restore, size))
            return places[-1].payload

        part = bring(peer, self._wanted(order, peer.rank))
        joined = slices.join(part, open_other, room)
        if joined is part:
            room(len(part.payload))[:] = part.payload
        writer.commit(places[-1], part.header.digest)
        return came

    def _wanted(self, order: StartRanks, rank: Rank, reader: Rank | None = None) -> Get:
        return Get(
            rank=rank,
            step=order.restore,
            generation=order.restore_generation,
            world_size=self._here.savers_of(order),
            reader=reader,
        )


def _names(peers: Sequence[Peer]) -> str:
    return ", ".join(sorted({peer.machine for peer in peers}))
