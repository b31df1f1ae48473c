"""Disk copies of one simulated machine, as agent/persist.py makes them; and what it is at work on.

Used by sim/agent.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from everstep.actions import PersistStep
from everstep.core.agent_io import AgentEvent, PersistShards
from everstep.events import PersistFailed, StepPersisted
from everstep.model import Copy, Seconds

if TYPE_CHECKING:
    from everstep.sim.machine import Machine

LOOK_AT_SAVES_S: Seconds = 0.25
DISK, LOCAL_DISK = "disk", "local disk"
"""Kinds of work."""


class Works:
    """What an agent is doing: of each kind the newest, older ones have been cancelled."""

    def __init__(self) -> None:
        self._tokens: dict[str, object] = {}

    def begin(self, kind: str) -> object:
        """The token that the work asks with whether it goes on."""
        token = self._tokens[kind] = object()
        return token

    def cancel(self, *kinds: str) -> None:
        """Nothing of these kinds goes on, or it is done."""
        for kind in kinds:
            self._tokens.pop(kind, None)

    def doing(self, kind: str, token: object) -> bool:
        return self._tokens.get(kind) is token

    def any(self, *kinds: str) -> bool:
        return any(kind in self._tokens for kind in kinds)


class Persisting:
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
        self._works = works
        self._after = after
        self._tell = tell

    def begin(self, action: PersistShards) -> None:
        """Carry the order out."""
        self._wait(action, self._works.begin(_kind(action.order)))

    def _wait(self, action: PersistShards, token: object) -> None:
        """Until every local rank has saved the step; then bring it to disk."""
        order = action.order
        if not self._works.doing(_kind(order), token):
            return
        slots = self._machine.own_slots()
        for memory in slots:
            memory.pin(order.step)
        problem, waiting = self._machine.saved(slots, order)
        if problem:
            self._fail(order, problem)
        elif waiting:
            self._after(LOOK_AT_SAVES_S, partial(self._wait, action, token))
        else:
            ground = self._machine.ground
            disk_s = ground.options.disk_s * ground.rng.uniform(0.5, 1.5)
            self._after(disk_s, partial(self._done, action, token))

    def _done(self, action: PersistShards, token: object) -> None:
        order, slots = action.order, self._machine.own_slots()
        if not self._works.doing(_kind(order), token):
            return
        found = [
            copy
            for memory in slots
            for copy in memory.copies()
            if (copy.step, copy.generation) == (order.step, order.generation)
        ]
        lost = len(found) < len(slots)
        problem = "a rank overwrote it meanwhile" if lost else self._put(order, found)
        if problem:
            self._fail(order, problem)
            return
        self._end(order)
        machine = self._machine.name
        self._tell(StepPersisted(machine=machine, action=order.id, step=order.step))

    def _put(self, order: PersistStep, found: list[Copy]) -> str:
        """Why it could not be done; empty if it is done."""
        disk, local_disk = self._machine.ground.disk, self._machine.local_disk
        if not order.local_disk:
            problems = [disk.persist(copy.rank, copy.step, copy.generation) for copy in found]
            return max(problems, default="")
        if disk.full:
            return "No space left on device"
        local_disk.keep((order.safe, order.step))
        for copy in found:
            local_disk.put(copy)
        return ""

    def _fail(self, order: PersistStep, reason: str) -> None:
        self._end(order)
        machine = self._machine.name
        self._tell(PersistFailed(machine=machine, action=order.id, step=order.step, reason=reason))

    def _end(self, order: PersistStep) -> None:
        """The slots are kept as long as the step is on its way to the other disk."""
        self._works.cancel(_kind(order))
        if not self._works.any(DISK, LOCAL_DISK):
            for memory in self._machine.all_slots():
                memory.pin(None)


def _kind(order: PersistStep) -> str:
    return LOCAL_DISK if order.local_disk else DISK
