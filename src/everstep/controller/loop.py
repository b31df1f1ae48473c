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
from everstep.events import ControllerEvent, MachineProgress, StepProgress, TimerFired
from everstep.journal import Journal

Act = Callable[[ControllerEvent, list[ControllerAction]], None]


class Loop:
    """Drives one core. `post` and `progress` are called from the same event loop."""

    def __init__(
        self, *, core: ControllerCore, journal: Journal, clock: Clock, intake: Intake
    ) -> None:
        self._core = core
        self._journal = journal
        self._clock = clock
        self._intake = intake
        self._queue: asyncio.Queue[Incoming] = asyncio.Queue()

    def post(self, incoming: Incoming) -> None:
        """Give it an event."""
        self._queue.put_nowait(incoming)

    def progress(self, report: MachineProgress) -> None:
        """Give it a machine's progress, which becomes an event at most once a second."""
        self._fold(self._intake.report(report, self._clock.now()))

    def _fold(self, progress: StepProgress | None) -> None:
        if progress is not None:
            self.post(Incoming(progress))

    async def run(self, act: Act) -> None:
        """Until the core ends the controller. Fenced, JournalUnwritable: stop at once."""
        while self._core.state.phase is not Phase.ENDED:
            self.take(await self._next(), act)

    def take(self, incoming: Incoming, act: Act) -> None:
        """Decide, remember, act. What has to be done before `run` is given here directly."""
        now = self._clock.now()
        actions = self._core.handle(incoming.event, now)
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
            due = self._core.next_deadline()
            folding = self._intake.next_deadline()
            wake_at = min((moment for moment in (due, folding) if moment is not None), default=None)
            wait_s = None if wake_at is None else max(0.0, wake_at - self._clock.now())
            try:
                async with asyncio.timeout(wait_s):
                    return await self._queue.get()
            except TimeoutError:
                now = self._clock.now()
                if due is not None and due <= now:
                    return Incoming(TimerFired())
                self._fold(self._intake.due(now))
