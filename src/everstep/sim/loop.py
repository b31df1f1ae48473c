"""The controller's loop in virtual time: take an event, ask the core, journal both, act.

controller/loop.py is the same loop in real time; they differ only in where the next event and the
time come from and in who acts. Here a turn is planned whenever there is something to take, and a
judge sees every turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from everstep.actions import DURABLE, ControllerAction
from everstep.core.controller import ControllerCore
from everstep.core.intake import Intake
from everstep.core.state import Phase, State
from everstep.events import ControllerEvent, Folded, TimerFired
from everstep.journal.records import Fenced, Origin
from everstep.model import Seconds
from everstep.sim.records import MemoryJournal
from everstep.sim.schedule import Schedule

Act = Callable[[ControllerEvent, list[ControllerAction]], None]


class Incoming(NamedTuple):
    """An event, what to do once it is journalled, and where it came from."""

    event: ControllerEvent
    then: Callable[[], None] | None = None
    origin: Origin | None = None


class Controls(NamedTuple):
    """What only a simulation has."""

    judge: Callable[[ControllerEvent, list[ControllerAction], State], None]
    """Sees every turn."""
    survives: Callable[[], bool]
    """Asked between the parts of a turn: False once the controller is dead, maybe from here on."""
    fenced: Callable[[], None]
    """A higher term was found; the controller ends."""


class Loop:
    """Drives one core. Everything it is told goes through one queue, in the order of arrival."""

    def __init__(
        self,
        *,
        core: ControllerCore,
        journal: MemoryJournal,
        schedule: Schedule,
        intake: Intake,
        controls: Controls,
    ) -> None:
        self.core = core
        self._journal = journal
        self._schedule = schedule
        self._controls = controls
        self._intake = intake
        self._queue: deque[Incoming | Folded] = deque()
        self._wake_at: Seconds | None = None
        self._act: Act | None = None

    def post(self, incoming: Incoming | Folded) -> None:
        """Give it an event, or what intake.py makes one of."""
        self._queue.append(incoming)
        self._plan(self._schedule.now)

    def run(self, act: Act) -> None:
        """From now on, take what comes, until the core ends the controller or it is killed."""
        self._act = act
        self._plan(self._schedule.now)

    def _plan(self, moment: Seconds) -> None:
        if self._act is not None and (self._wake_at is None or moment < self._wake_at):
            self._wake_at = moment
            self._schedule.at(moment, self._turn)

    def _turn(self) -> None:
        if self._wake_at is None or self._schedule.now < self._wake_at or self._act is None:
            return  # an earlier turn came in between
        self._wake_at = None
        try:
            while self.core.state.phase is not Phase.ENDED:
                incoming = self._next()
                if incoming is None or not self._controls.survives():
                    return
                self.take(incoming, self._act)
        except Fenced:
            self._controls.fenced()

    def take(self, incoming: Incoming, act: Act) -> None:
        """Decide, remember, act. Raises Fenced."""
        now, survives = self._schedule.now, self._controls.survives
        actions = self.core.handle(incoming.event, now)
        if self.core.state.spec is not None:
            self._intake.expect(self.core.state.job)
        if not survives():
            return
        self._journal.append(incoming.event, now, origin=incoming.origin, actions=actions)
        self._controls.judge(incoming.event, actions, self.core.state)
        if any(isinstance(action, DURABLE) for action in actions):
            self._journal.sync()
        if not survives():
            return
        if incoming.then is not None:
            incoming.then()
        act(incoming.event, actions)
        if self._journal.snapshot_due and survives():
            self._journal.write_snapshot(self.core.snapshot())

    def _next(self) -> Incoming | None:
        """The next event; TimerFired when the core's deadline has come. None: planned for later."""
        now = self._schedule.now
        while self._queue:
            taken = self._queue.popleft()
            if isinstance(taken, Incoming):
                return taken
            fact = self._intake.take(taken, now)
            if fact is not None:
                return Incoming(fact)
        due, folding = self.core.next_deadline(), self._intake.next_deadline()
        if due is not None and due <= now:
            return Incoming(TimerFired())
        progress = self._intake.next_fact(now)
        if progress is not None:
            return Incoming(progress)
        for moment in (due, folding):
            if moment is not None:
                self._plan(moment)
        return None
