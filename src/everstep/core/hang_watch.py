"""What must hold of hangs and slow training that machines go for, by events and decisions alone.

Used by invariants.py. Like Watch it knows nothing of the core's state. It says what is wrong, as
clauses: none if all is well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec

from everstep.actions import (
    BeginGeneration,
    CollectStacks,
    ControllerAction,
    EvictMachine,
    FinishJob,
    JudgeStacks,
    StartRanks,
    StopRanks,
)
from everstep.core.look_watch import FINAL
from everstep.events import ControllerEvent, MachineJoined, MachineLost, StepProgress
from everstep.looks import LookResult, Purpose
from everstep.model import NO_GENERATION, NO_STEP, Generation, MachineId, PolicySpec, Step
from everstep.sightings import StragglerSeen


class _Look(msgspec.Struct, kw_only=True):
    """One look."""

    number: int
    purpose: Purpose
    step: Step
    """The newest that any rank had finished when it began."""
    judged: bool = False


class HangWatch:
    """Hears every event and sees every decision, from the first record on."""

    def __init__(self) -> None:
        self._generation: Generation = NO_GENERATION
        self._run_on: dict[MachineId, None] = {}
        """Machines where its ranks were ordered to start; none once one was ordered to stop."""
        self._finished = False
        self._step: Step = NO_STEP
        """The newest that any rank of the generation has finished."""
        self._looks: list[_Look] = []
        """Of the generation."""
        self._straggles = False
        """One rank of it is said to hold up all others."""
        self._named: dict[MachineId, int] = {}
        """By looks since ranks were started last -> the number of the look."""
        self._went: dict[int, int] = {}
        """How many machines were evicted for each look."""
        self._known: dict[MachineId, None] = {}
        """Machines that ever came and are not known to be gone."""

    def hear(self, event: ControllerEvent) -> None:
        if isinstance(event, StepProgress) and event.generation == self._generation:
            self._step = max(self._step, event.finished_by_one)
        elif isinstance(event, StragglerSeen) and event.generation == self._generation:
            self._straggles = self._straggles or event.rank is not None
        elif isinstance(event, MachineJoined):
            self._known[event.machine] = None
        elif isinstance(event, MachineLost):
            self._known.pop(event.machine, None)

    def names(self, machine: MachineId) -> bool:
        """Whether a look named it, since ranks were started last."""
        return machine in self._named

    def see(self, action: ControllerAction, policy: PolicySpec) -> Iterator[str]:
        """What is wrong with this decision."""
        if isinstance(action, BeginGeneration):
            self._generation, self._step, self._straggles = action.generation, NO_STEP, False
            self._run_on.clear()
            self._looks.clear()
        elif isinstance(action, StartRanks):
            self._run_on[action.machine] = None
            self._named.clear()
        elif isinstance(action, StopRanks) and action.machine in self._run_on:
            self._run_on.clear()
        elif isinstance(action, FinishJob):
            self._finished = True
        elif isinstance(action, CollectStacks):
            yield from self._collect(action)
        elif isinstance(action, JudgeStacks):
            yield from self._judge(action, policy)

    def _collect(self, action: CollectStacks) -> Iterator[str]:
        name = f"CollectStacks {action.id}"
        if self._finished or action.machine not in self._run_on:
            yield f"{name} comes when no ranks are to be looked at"
        newest = self._looks[-1] if self._looks else None
        if newest is not None and newest.number == action.look:
            return
        # What a person asked for is asked for anew when the hang that it came into is over.
        again = newest is not None and newest.purpose is action.purpose is not Purpose.ASKED
        if newest is not None and not newest.judged and again:
            yield f"{name} begins look {action.look}, and look {newest.number} is not judged"
        look = _Look(number=action.look, purpose=action.purpose, step=self._step)
        self._looks.append(look)

    def _judge(self, action: JudgeStacks, policy: PolicySpec) -> Iterator[str]:
        """Nobody goes after one look, and nothing is a hang that went on meanwhile."""
        name = f"JudgeStacks {action.id} ({action.result})"
        look = next((each for each in self._looks if each.number == action.look), None)
        if look is None:
            yield f"{name} is of look {action.look}, which is not of generation {self._generation}"
            return
        look.judged = True
        named = action.result is LookResult.MACHINES
        alike = [each for each in self._looks if each.purpose is look.purpose]
        if look.purpose is Purpose.HANG and action.result in FINAL:
            first = alike[-2] if named and len(alike) > 1 else look
            if self._step > first.step:
                yield f"{name}, and step {self._step} was finished since look {first.number} began"
        elif look.purpose is Purpose.SLOW and named:
            few = len(alike) < policy.slow_flags and not self._straggles
            if few:
                yield f"{name} follows {len(alike)} looks at slow training"
        if named and look.purpose is not Purpose.ASKED:
            self._named = dict.fromkeys(action.machines, action.look)

    def evict(self, action: EvictMachine, taken: Collection[MachineId]) -> Iterator[str]:
        """For a look no more go than there are machines that could take a place.

        `taken`: members, and machines that are evicted.
        """
        look = self._named[action.machine]
        self._went[look] = self._went.get(look, 0) + 1
        ready = [machine for machine in self._known if machine not in taken]
        if self._went[look] > len(ready):
            yield (
                f"{action.id} evicts machine {self._went[look]} for look {look}, and only"
                f" {len(ready)} can take a place"
            )
