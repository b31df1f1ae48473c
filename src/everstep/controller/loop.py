"""The controller's loop: take an event, ask the core, journal both, act. One screen.

sim/loop.py is the same loop in virtual time; they differ only in where the next event and the time
come from and in who acts. Nothing is acted on before it is in the journal, and what must never be
decided twice differently (actions.DURABLE) not before it is on disk. It never catches an error:
whatever stops it, the next controller goes on from the journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from everstep.actions import DURABLE, ControllerAction
from everstep.controller.clock import Clock
from everstep.controller.incoming import Incoming
from everstep.core.controller import ControllerCore
from everstep.core.intake import Intake
from everstep.core.state import Phase
from everstep.events import ControllerEvent, Folded, TimerFired
from everstep.journal import Journal
from everstep.model import Seconds

Act = Callable[[ControllerEvent, list[ControllerAction]], None]


class Loop:
    """Drives one core. Everything it is told goes through one queue, in the order of arrival."""

    def __init__(
        self, *, core: ControllerCore, journal: Journal, clock: Clock, intake: Intake
    ) -> None:
        self._core = core
        self._journal = journal
        self._clock = clock
        self._intake = intake
        self._queue: asyncio.Queue[Incoming | Folded] = asyncio.Queue()

    def post(self, incoming: Incoming | Folded) -> None:
        """Give it an event, or what intake.py makes one of."""
        self._queue.put_nowait(incoming)

    async def run(self, act: Act) -> None:
        """Until the core ends the controller. Fenced, JournalUnwritable: stop at once."""
        while self._core.state.phase is not Phase.ENDED:
            self.take(await self._next(), act)

    def take(self, incoming: Incoming, act: Act) -> None:
        """Decide, remember, act. What has to be done before `run` is given here directly."""
        now = self._clock.now()
        actions = self._core.handle(incoming.event, now)
        if self._core.state.spec is not None:
            self._intake.expect(self._core.state.job)
        self._journal.append(incoming.event, now, origin=incoming.origin, actions=actions)
        if any(isinstance(action, DURABLE) for action in actions):
            self._journal.sync()
        if incoming.then is not None:
            incoming.then()
        act(incoming.event, actions)
        if self._journal.snapshot_due:
            self._journal.write_snapshot(self._core.snapshot())

    async def _next(self) -> Incoming:
        """The next event; TimerFired when the core's deadline comes before one."""
        while True:
            due, folding = self._core.next_deadline(), self._intake.next_deadline()
            taken = await self._wait(due, folding)
            if isinstance(taken, Incoming):
                return taken
            now = self._clock.now()
            if taken is None and due is not None and due <= now:
                return Incoming(TimerFired())
            fact = self._fold(taken, now)
            if fact is not None:
                return Incoming(fact)

    def _fold(self, taken: Folded | None, now: Seconds) -> ControllerEvent | None:
        return self._intake.take(taken, now) if taken else self._intake.next_fact(now)

    async def _wait(self, *moments: Seconds | None) -> Incoming | Folded | None:
        """What comes next; None if the first of these moments does."""
        wake_at = min((moment for moment in moments if moment is not None), default=None)
        wait_s = None if wake_at is None else max(0.0, wake_at - self._clock.now())
        try:
            async with asyncio.timeout(wait_s):
                return await self._queue.get()
        except TimeoutError:
            return None
