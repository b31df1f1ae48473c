"""The controller's core: told facts, answers with actions.

Driven by controller/loop.py with real time and sockets and by sim/loop.py with virtual ones. One
event is handled in three pure steps that each have a file of their own:

    observe(state, event)   what happened becomes what is known      observe.py
    decide(state)           what is known becomes what to do         rules.py
    commit(state, action)   what to do becomes what was decided      commit.py

The last two repeat until the rules are content. In a replay adopt() takes the recorded actions
instead of the rules' and reports where the rules would have decided differently now.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from everstep.actions import ControllerAction
from everstep.core.commit import commit
from everstep.core.ettr import Owner
from everstep.core.observe import observe
from everstep.core.patience import AT_ONCE, NEVER, deadlines
from everstep.core.resize import note_shortage
from everstep.core.rules import decide
from everstep.core.state import Phase, State
from everstep.events import ControllerEvent
from everstep.model import MachineId, Seconds, Value

ROUNDS_MAX = 100
"""Rules that are not content after this many rounds for one event contradict each other."""


class Difference(Value, frozen=True, kw_only=True):
    """Where this version's rules do not decide as the journal says."""

    seq: int
    recorded: tuple[ControllerAction, ...]
    decided: tuple[ControllerAction, ...]


class ControllerCore:
    """Facts in, actions out. `state` is for reading."""

    def __init__(self, state: State | None = None) -> None:
        self.state = State() if state is None else state
        self._handled_at: Seconds = AT_ONCE

    def handle(self, event: ControllerEvent, now: Seconds) -> list[ControllerAction]:
        """Take one fact at time `now` (never smaller than the last one) and say what to do."""
        self._observe(event, now)
        actions: list[ControllerAction] = []
        for _ in range(ROUNDS_MAX):
            decided = decide(self.state, now, len(actions))
            if not decided:
                self._account(now)
                return actions
            for action in decided:
                commit(self.state, action, now)
            actions += decided
        last = [type(action).__name__ for action in actions[-10:]]
        raise AssertionError(f"rules do not settle on event {self.state.seq}: ... {last}")

    def adopt(
        self, event: ControllerEvent, now: Seconds, recorded: Sequence[ControllerAction]
    ) -> Difference | None:
        """Handle `event` as the journal says it was handled; None if this version agrees."""
        self._observe(event, now)
        done = 0
        difference: Difference | None = None
        for _ in range(ROUNDS_MAX):
            decided = tuple(decide(self.state, now, done))
            expected = tuple(recorded[done : done + len(decided)])
            if decided != expected or (not decided and done < len(recorded)):
                rest = tuple(recorded[done:])
                difference = Difference(seq=self.state.seq, recorded=rest, decided=decided)
                decided = rest
            for action in decided:
                commit(self.state, action, now)
            done += len(decided)
            if difference is not None or not decided:
                break
        self._account(now)
        return difference

    def next_deadline(self) -> Seconds | None:
        """When to deliver TimerFired if nothing comes earlier; None: nothing is waited for.

        Moments at or before the newest event are past: the rules have seen them.
        """
        coming = [
            at for at in deadlines(self.state, self._handled_at) if self._handled_at < at < NEVER
        ]
        return min(coming, default=None)

    def outstanding(self, machine: MachineId | None) -> list[ControllerAction]:
        """Actions without an answer yet: a machine's orders, or (None) the shell's own."""
        return [
            action
            for action in self.state.outstanding.values()
            if getattr(action, "machine", None) == machine
        ]

    def snapshot(self) -> bytes:
        """The whole state; two cores are equal if their snapshots are."""
        return msgspec.msgpack.encode((self._handled_at, self.state))

    @classmethod
    def from_snapshot(cls, data: bytes) -> ControllerCore:
        handled_at, state = msgspec.msgpack.decode(data, type=tuple[Seconds, State])
        core = cls(state)
        core._handled_at = handled_at
        return core

    def _observe(self, event: ControllerEvent, now: Seconds) -> None:
        assert now >= self._handled_at, f"time went back from {self._handled_at} to {now}"
        self._handled_at = now
        self.state.seq += 1
        observe(self.state, event, now)

    def _account(self, now: Seconds) -> None:
        """Who owns the time from here on, where the phase alone says so."""
        state = self.state
        note_shortage(state, now)
        if state.spec is None:
            return
        owner = _owner(state)
        if owner is not None:
            incident = state.incident
            state.account.switch(owner, now, incident.incident if incident else "")


def _owner(state: State) -> Owner | None:
    """None: progress reports decide (observe.py), not the phase."""
    if state.phase is Phase.GATHERING:
        return Owner.WAITING
    if state.phase is Phase.STOPPING:
        if not state.full:
            return Owner.WAITING
        waits_for_silent = any(name in state.silent for name in state.awaiting)
        return Owner.LOCATING if waits_for_silent else Owner.RESTARTING
    if state.failures:
        return Owner.LOCATING
    if state.phase is Phase.STARTING:
        return Owner.RESTARTING
    return None
