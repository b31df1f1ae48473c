"""What must hold of code versions, judged by facts and decisions alone. Used by invariants.py.

Like Watch it knows nothing of the core's state. It says what is wrong, as clauses: none if all is
well.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from everstep.actions import (
    BeginGeneration,
    ControllerAction,
    HoldVersion,
    RefuseUpdate,
    Rung,
    StartRanks,
    SwitchCode,
    TryVersion,
)
from everstep.events import (
    ControllerEvent,
    JobSubmitted,
    MachineJoined,
    RollbackRequested,
    UpdateRequested,
    VersionHeld,
    VersionTried,
)
from everstep.model import NO_VERSION, MachineId, Seconds, VersionId

TRIALS_MIN = 3
"""A version of which nothing could be told was tried so often before it runs."""


class _Sent(msgspec.Struct, kw_only=True):
    """What people said of one version, and what came of it."""

    content: tuple[int, int]
    """Files and bytes."""
    due_at: Seconds
    untried: bool
    open: bool = True
    """It may be put in place."""
    imports: bool = False
    trials: int = 0

    @property
    def tried(self) -> bool:
        return self.imports or self.untried or self.trials >= TRIALS_MIN


class CodeWatch:
    """Judges every event and decision that is about code, from the first record on."""

    def __init__(self) -> None:
        self.submitted: VersionId = NO_VERSION
        self.runs: VersionId = NO_VERSION
        self._sent: dict[VersionId, _Sent] = {}
        self._ran: dict[VersionId, None] = {}
        self._refused: dict[VersionId, None] = {}
        self._held: dict[MachineId, set[VersionId] | None] = {}
        """None: its agent knows of no versions."""
        self._orders: dict[str, HoldVersion | TryVersion] = {}
        self._rollback_asked = False
        self._starting: VersionId | None = None
        """Of the current generation, once ranks were started."""

    def hear(self, event: ControllerEvent, now: Seconds) -> Iterator[str]:
        """What is wrong with what is told."""
        if isinstance(event, JobSubmitted):
            self.submitted = self.runs = event.spec.code.version
            self._ran[self.runs] = None
        elif isinstance(event, MachineJoined):
            held = event.versions
            self._held[event.machine] = None if held is None else set(held)
        elif isinstance(event, VersionHeld):
            self._hear_held(event)
        elif isinstance(event, VersionTried):
            self._hear_tried(event)
        elif isinstance(event, RollbackRequested):
            self._rollback_asked = True
        elif isinstance(event, UpdateRequested) and event.code.version != self.runs:
            yield from self._hear_update(event, now)

    def _hear_update(self, event: UpdateRequested, now: Seconds) -> Iterator[str]:
        version, content = event.code.version, (event.code.files, event.code.size_bytes)
        known = self._sent.get(version)
        if known is not None and known.content != content:
            yield f"version {version} had {known.content} files and bytes, and now has {content}"
        due_at = now if event.urgent else now + event.within_s
        sent = _Sent(content=content, due_at=due_at, untried=event.untried)
        if known is not None and known.open:
            sent.due_at = min(sent.due_at, known.due_at)
            sent.untried = sent.untried or known.untried
            sent.imports, sent.trials = known.imports, known.trials
        self._refused.pop(version, None)
        self._sent[version] = sent

    def _hear_held(self, event: VersionHeld) -> None:
        order, held = self._orders.get(event.action), self._held.get(event.machine)
        right = isinstance(order, HoldVersion) and order.machine == event.machine
        if right and order is not None and order.version == event.version and held is not None:
            held.add(event.version)

    def _hear_tried(self, event: VersionTried) -> None:
        order, sent = self._orders.get(event.action), self._sent.get(event.version)
        right = isinstance(order, TryVersion) and order.machine == event.machine
        if right and sent is not None and not event.untold and not event.problem:
            sent.imports = True

    def see(self, action: ControllerAction, now: Seconds) -> Iterator[str]:
        """What is wrong with this decision."""
        if isinstance(action, BeginGeneration):
            self._starting = None
            if action.planned in (Rung.HOT_UPDATE, Rung.ROLLBACK):
                yield from self._begin(action, now)
        elif isinstance(action, SwitchCode):
            yield from self._switch(action)
        elif isinstance(action, RefuseUpdate):
            self._refused[action.version] = None
            if action.version in self._sent:
                self._sent[action.version].open = False
        elif isinstance(action, StartRanks):
            yield from self._start(action)
        elif isinstance(action, HoldVersion | TryVersion):
            yield from self._order(action)

    def _begin(self, action: BeginGeneration, now: Seconds) -> Iterator[str]:
        """Healthy ranks are stopped only for what is urgent, or has waited for long enough."""
        if action.planned is Rung.ROLLBACK:
            if not self._rollback_asked:
                yield f"{action.id} stops ranks for a rollback that nobody asked for"
        elif not any(s.open and s.tried and now >= s.due_at for s in self._sent.values()):
            yield f"{action.id} stops ranks for an update, and none was tried and is urgent or due"

    def _switch(self, action: SwitchCode) -> Iterator[str]:
        name, version = f"SwitchCode {action.id}", action.version
        if self._starting is not None:
            yield f"{name} comes after the ranks of its generation were started"
        if action.previous != self.runs:
            yield f"{name} changes from {action.previous!r}, and {self.runs!r} runs"
        if version in self._refused:
            yield f"{name} puts in place what was refused"
        if action.rolled_back or version in self._ran:
            sent = self._sent.get(version)
            if version not in self._ran:
                yield f"{name} goes back to {version!r}, which never ran"
        else:
            sent = self._sent.get(version)
            if sent is None or not sent.open:
                yield f"{name} puts in place {version!r}, which nobody sent"
            elif not sent.tried:
                yield f"{name} puts in place {version!r}, which nobody has imported"
        if sent is not None:
            sent.open = False
        self._ran[version] = None
        self.runs = version

    def _start(self, action: StartRanks) -> Iterator[str]:
        name = f"StartRanks {action.id}"
        if self._starting is not None and action.version != self._starting:
            yield f"{name} starts {action.version!r}, others of its generation {self._starting!r}"
        self._starting = action.version
        if action.version != self.runs:
            yield f"{name} starts {action.version!r}, and {self.runs!r} is what runs"
        held = self._held.get(action.machine)
        old = held is None and action.version == self.submitted
        if action.version != NO_VERSION and not old and action.version not in (held or ()):
            yield f"{name} starts {action.version!r} on {action.machine}, which does not have it"

    def _order(self, action: HoldVersion | TryVersion) -> Iterator[str]:
        self._orders[action.id] = action
        held = self._held.get(action.machine)
        if held is None:
            yield f"{action.id} is about code, and the agent of {action.machine} knows of none"
        elif isinstance(action, HoldVersion):
            held &= {*action.keep, action.version}
        else:
            if action.version not in held:
                yield f"{action.id} tries {action.version!r} where it is not"
            if action.version in self._sent:
                self._sent[action.version].trials += 1
