"""Connections between agents and controllers: frames that are late, lost, doubled or cut off."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from everstep import wire
from everstep.model import Seconds

if TYPE_CHECKING:
    from everstep.sim.ground import Ground


class Peer(Protocol):
    """One end of a connection."""

    @property
    def alive(self) -> bool: ...
    def receive(self, connection: Connection, frame: wire.AnyFrame) -> None: ...
    def closed(self, connection: Connection) -> None:
        """The connection is gone: closed by the other end, or noticed to be dead."""


class Connection:
    """One WebSocket, so to speak. Each end speaks by `send`."""

    def __init__(self, ground: Ground, agent: Peer, controller: Peer) -> None:
        self.open = True
        self._ground = ground
        self._ends = (agent, controller)
        self._silent = False
        self._arrives: dict[int, Seconds] = {0: 0.0, 1: 0.0}

    def send(self, sender: Peer, frame: wire.AnyFrame) -> None:
        """Into the network; nothing says whether it arrives."""
        ground, network = self._ground, self._ground.options.network
        if not self.open or self._silent:
            return
        times = 1
        if not ground.calm:
            times -= ground.rng.random() < network.loss
            times += ground.rng.random() < network.doubled
        to = 0 if sender is self._ends[1] else 1
        data = wire.encode(frame)
        for _ in range(times):
            at = ground.schedule.now + network.latency_s * ground.rng.uniform(0.5, 2.0)
            if ground.calm or not network.reordered:
                at = self._arrives[to] = max(at, self._arrives[to])
            ground.schedule.at(at, partial(self._arrive, to, data))

    def close(self) -> None:
        """One end closes it or dies: the other one hears of it soon."""
        if not self.open:
            return
        self.open = False
        for end in self._ends:
            self._ground.schedule.after(
                self._ground.options.network.latency_s, partial(self._tell, end)
            )

    def cut(self) -> None:
        """The cable breaks: both ends hear nothing, and notice that after a while."""
        if self.open and not self._silent:
            self._silent = True
            self._ground.schedule.after(self._ground.options.network.noticed_s, self.close)

    def _arrive(self, to: int, data: bytes) -> None:
        if self.open and not self._silent and self._ends[to].alive:
            self._ends[to].receive(self, wire.decode(data))

    def _tell(self, end: Peer) -> None:
        if end.alive:
            end.closed(self)
