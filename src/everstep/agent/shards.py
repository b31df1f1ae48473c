"""All that this agent has to do with its peers: its server, its backups, its fetches, their client.

Put together for effects.py and shell.py. Everything that transfers runs in threads of its own; a
hung peer costs a thread and no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from everstep.actions import BackUpStep, StartRanks
from everstep.agent.backing_up import BackingUp
from everstep.agent.fetching import Fetching, NotFetched
from everstep.agent.log import say
from everstep.agent.saved import Saves
from everstep.agent.this_machine import ThisMachine
from everstep.agent.transfer.client import Client
from everstep.agent.transfer.desk import Desk
from everstep.agent.transfer.identity import Identity
from everstep.agent.transfer.listening import address_of, bind
from everstep.agent.transfer.server import ShardServer
from everstep.checkpoint.tier import tier_at
from everstep.code.store import CodeStore
from everstep.events import BackupFailed, StepBackedUp
from everstep.model import (
    Copy,
    EverstepError,
    Generation,
    Published,
    Rank,
    Seconds,
)


class Shards:
    """Of one agent. Where nothing can be shared there is no server, and the port is 0."""

    def __init__(
        self,
        here: ThisMachine,
        saves: Saves,
        step_s: Callable[[], Seconds | None],
        port: int,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        """`port`: where a former agent of this machine listened, 0 for none; `busy`: whether a rank
        communicates, so that backups yield. Raises OSError.
        """
        spec = here.spec
        serves = spec.backs_up or (spec.nnodes > 1 and bool(spec.code.roots))
        token = here.job.token.read_bytes().strip() if serves else b""
        me = Identity(token, spec.uid, here.setup.machine)
        self.client = client = Client(me)
        self.code_store = CodeStore(here.paths.code)
        """Of which code versions are given to peers."""
        self._directory = spec.checkpoint.directory
        self._backs_up = spec.backs_up
        self._desk = Desk(me, here.shm, self.code_store)
        self._kept = self._desk.kept
        self._backing_up = BackingUp(here, saves, client, step_s, busy)
        self._fetching = Fetching(here, client)
        self._server: ShardServer | None = None
        self.address = here.setup.address
        """Where peers reach the server."""
        if serves:
            self.address = _address(here)
            self._server = ShardServer(bind(self.address, port, say), self._desk, say)

    def open(self, generation: Generation) -> None:
        """Take and give shards from now on; `generation` is the newest that was ordered."""
        self.fence(generation)
        if self._server is not None:
            self._server.start()

    @property
    def port(self) -> int:
        """The server's."""
        return 0 if self._server is None else self._server.port

    def backups(self) -> tuple[Copy, ...]:
        """Complete shards of other machines' ranks."""
        return tuple(self._kept.inventory())

    def fence(self, generation: Generation) -> None:
        """What older generations ordered changes nothing here any more: backups() is settled."""
        self._desk.fence(generation)

    async def back_up(self, order: BackUpStep) -> StepBackedUp | BackupFailed:
        return await self._backing_up.back_up(order)

    async def make_ready(
        self,
        order: StartRanks,
        ranks: list[Rank],
        within_s: Seconds,
        own_disk: Collection[Copy] = (),
    ) -> None:
        """Before ranks start: forget what is newer than they restore, fetch what is not here.

        `own_disk` is what the ranks find on this machine's disk. Raises NotFetched or OSError.
        """
        self._kept.drop_newer(order.restore)
        if order.restore_nnodes:
            self._kept.keep_only(order.restore)
        try:
            await self._fetching.fetch(order, within_s)
        except NotFetched as error:
            wanted = {_copy(order, peer.rank) for peer in order.fetch}
            if not wanted.issubset(own_disk) and not await self._published(order):
                raise
            say(f"{error}; the ranks read it from disk instead")
        if self._backs_up:
            self._backing_up.keep_restored(ranks, order.restore)

    async def _published(self, order: StartRanks) -> bool:
        """Whether any rank finds the step to restore outside of memory, too."""
        wanted = Published(step=order.restore, generation=order.restore_generation)
        try:
            tier = await asyncio.to_thread(tier_at, self._directory)
            return wanted in await asyncio.to_thread(tier.published)
        except (EverstepError, OSError):
            return False

    async def idle(self) -> None:
        """Wait until no fetch that was given up writes any more."""
        await self._fetching.idle()

    def close(self) -> None:
        """End all threads soon."""
        self._fetching.close()
        self._backing_up.close()
        if self._server is not None:
            self._server.close()


def _copy(order: StartRanks, rank: Rank) -> Copy:
    return Copy(rank=rank, step=order.restore, generation=order.restore_generation)


def _address(here: ThisMachine) -> str:
    """Of the interface that backups shall go over."""
    interface = here.spec.checkpoint.backup_interface
    if not interface:
        return here.setup.address
    found = address_of(interface)
    if found is None:
        say(f"there is no address of {interface} here: backups go over {here.setup.address}")
    return found or here.setup.address
