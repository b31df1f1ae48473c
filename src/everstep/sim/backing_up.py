"""Backups of one simulated machine, as agent/backing_up.py sends them. Used by sim/agent.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from everstep.core.agent_io import AgentEvent, BackUpShards
from everstep.events import BackupFailed, StepBackedUp
from everstep.model import NO_STEP, Seconds
from everstep.sim.parts import part_of, replicated
from everstep.sim.persisting import LOOK_AT_SAVES_S, Works

if TYPE_CHECKING:
    from everstep.sim.agent import Agent
    from everstep.sim.machine import Machine

BACKUP = "backup"
"""Kind of work."""


class BackingUp:
    """Of one agent."""

    def __init__(
        self,
        machine: Machine,
        works: Works,
        after: Callable[[Seconds, Callable[[], None]], None],
        tell: Callable[[AgentEvent], None],
    ) -> None:
        """`after` plans what only a living agent does, `tell` tells its core."""
        self._machine = machine
        self._ground = machine.ground
        self._works = works
        self._after = after
        self._tell = tell

    def begin(self, action: BackUpShards) -> None:
        self._wait(action, self._works.begin(BACKUP))

    def _wait(self, action: BackUpShards, token: object) -> None:
        """Wait until every local rank has saved the step, then send it."""
        if not self._works.doing(BACKUP, token):
            return
        order, slots = action.order, self._machine.own_slots()
        for memory in slots:
            memory.pin_for_backup(order.step, order.safe if order.safe != NO_STEP else None)
        problem, waiting = self._machine.saved(slots, order)
        if problem:
            self._not_backed_up(action, problem)
        elif waiting:
            self._after(LOOK_AT_SAVES_S, partial(self._wait, action, token))
        else:
            self._send_shards(action, token)

    def _send_shards(self, action: BackUpShards, token: object) -> None:
        order = action.order
        begun: list[tuple[Machine, Agent | None, int]] = []
        for peer in order.peers:
            target = self._ground.machines[peer.machine]
            if not target.serves(order.generation):
                self._not_backed_up(action, f"{peer.machine} takes no shards")
                return
            index = target.kept.begin(part_of(self._machine, order, peer.rank), order.safe)
            begun.append((target, target.agent, index))
        transfer_s = self._ground.options.transfer_s * self._ground.rng.uniform(0.5, 1.5)
        takes_s = max(order.spread_s, transfer_s)
        self._after(takes_s, partial(self._sent, action, token, begun))

    def _sent(
        self, action: BackUpShards, token: object, begun: list[tuple[Machine, Agent | None, int]]
    ) -> None:
        order, machine = action.order, self._machine.name
        if not self._works.doing(BACKUP, token):
            return
        for peer, (target, agent, index) in zip(order.peers, begun, strict=True):
            part = part_of(self._machine, order, peer.rank)
            if not target.serves(order.generation) or target.agent is not agent:
                self._not_backed_up(action, f"{peer.machine} broke the connection")
                return
            if replace(part, replicas=()) not in self._machine.slots(peer.rank).copies():
                self._not_backed_up(action, f"rank {peer.rank} overwrote the step")
                return
            target.kept.commit(index, part)
        self._tell(
            StepBackedUp(
                machine=machine,
                action=order.id,
                step=order.step,
                replicated=replicated(self._machine, order),
            )
        )

    def _not_backed_up(self, action: BackUpShards, reason: str) -> None:
        machine, order = self._machine.name, action.order
        for slots in self._machine.own_slots():
            slots.pin_for_backup(None, order.safe if order.safe != NO_STEP else None)
        self._tell(
            BackupFailed(
                machine=machine,
                action=order.id,
                step=order.step,
                reason=reason,
                late="has overwritten" in reason,
            )
        )
