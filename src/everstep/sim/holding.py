"""How a simulated machine gets and tries code versions, as agent/ does. For agent.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from everstep.actions import HoldVersion, TryVersion
from everstep.events import VersionHeld, VersionNotHeld, VersionTried
from everstep.model import Seconds
from everstep.sim.code import NOT_FOUND, Flaw

if TYPE_CHECKING:
    from everstep.sim.machine import Machine

Answer = VersionHeld | VersionNotHeld | VersionTried
LAUNCHER_AGAIN_S: Seconds = 0.5


class Holding:
    """Of one agent."""

    def __init__(
        self,
        machine: Machine,
        after: Callable[[Seconds, Callable[[], None]], None],
        answer: Callable[[Answer], None],
    ) -> None:
        """`after` plans what only a living agent does."""
        self._machine = machine
        self._ground = machine.ground
        self._after = after
        self._answer = answer

    def get(self, order: HoldVersion) -> None:
        """From its own store, a peer, else the controller: the last two take time.

        What is not to be kept goes now: what comes later was ordered later.
        """
        kept = (*order.keep, order.version)
        self._machine.code = dict.fromkeys(v for v in self._machine.code if v in kept)
        here = order.version in self._machine.code
        longest_s = 0.1 if here else self._ground.options.transfer_s
        takes_s = min(longest_s * self._ground.rng.uniform(0.5, 1.5), order.within_s)
        self._after(takes_s, partial(self._got, order))

    def _got(self, order: HoldVersion) -> None:
        reason = self._problem(order)
        if not reason:
            self._machine.code[order.version] = None
            self._answer(VersionHeld(machine=order.machine, action=order.id, version=order.version))
            return
        self._answer(
            VersionNotHeld(
                machine=order.machine, action=order.id, version=order.version, reason=reason
            )
        )

    def _problem(self, order: HoldVersion) -> str:
        ground = self._ground
        if order.version in self._machine.code:
            return ""
        if not ground.calm and ground.rng.random() < ground.options.not_held:
            return "No space left on device"
        for source in order.sources:
            peer = ground.machines[source.machine]
            if peer.serves(self._machine.fenced) and order.version in peer.code:
                return ""
        reached = ground.controller is not None and ground.controller.alive
        return "" if reached and self._machine.reachable else "nobody gave it"

    def try_it(self, order: TryVersion) -> None:
        """In a fork of the launcher: one that dies takes the trial with it, and nobody answers."""
        machine = self._machine
        if not machine.launcher_up:
            wait = partial(self.try_it, order)
            self._after(LAUNCHER_AGAIN_S, wait)
            return
        takes_s = self._ground.rng.uniform(0.2, 3.0) * machine.slowness
        self._after(min(takes_s, order.within_s), partial(self._tried, order, machine.launchers))

    def _tried(self, order: TryVersion, launchers: int) -> None:
        ground, machine = self._ground, self._machine
        if machine.launchers != launchers:
            return
        tried = VersionTried(machine=machine.name, action=order.id, version=order.version)
        flaws = ground.codes.flaws(order.version)
        if order.version not in machine.code:
            self._answer(replace(tried, untold="it is not here"))
        elif not ground.calm and ground.rng.random() < ground.options.untold:
            self._answer(replace(tried, untold=f"it was not done within {order.within_s:g} s"))
        elif Flaw.NO_IMPORT in flaws:
            problem = f"{NOT_FOUND.kind}: {NOT_FOUND.message} (train.py, line 3)"
            self._answer(replace(tried, problem=problem, detail=NOT_FOUND.traceback))
        else:
            self._answer(tried)
