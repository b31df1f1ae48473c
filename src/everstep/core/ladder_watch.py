"""What must hold of the rungs that are taken, judged by decisions alone. Used by invariants.py.

Like Watch it knows nothing of the core's state. It says what is wrong, as clauses: none if all is
well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from everstep.actions import (
    BeginGeneration,
    CloseIncident,
    ControllerAction,
    EvictMachine,
    FinishJob,
    OpenIncident,
    Rung,
    StartRanks,
    SwitchCode,
    TakeRung,
)
from everstep.core.ladder import CHANGES, HEIGHT, NOT_YET
from everstep.model import NO_GENERATION, Generation, PolicySpec

EVICTIONS = frozenset(
    {Rung.EVICT, Rung.EVICT_AGGREGATED, Rung.EVICT_TESTED, Rung.EVICT_REPLAYED},
)


class LadderWatch:
    """Judges all decisions of one event after the other, from the first record on."""

    def __init__(self) -> None:
        self.incident = ""
        """The open one; empty: none is."""
        self._heights: dict[str, int] = {}
        """How high each class of failure stands in it."""
        self.rollbacks = 0
        """Of the ladder, in it."""
        self._evicted = 0
        """Machines, in it."""
        self._generation: Generation = NO_GENERATION
        self._planned: Rung | None = None
        self._taken: list[TakeRung] = []
        """For the generation that has begun and not started."""
        self._started = False
        self._compared = False
        """Stacks were, since ranks were started last."""

    def see(self, actions: Sequence[ControllerAction], policy: PolicySpec) -> Iterator[str]:
        """What is wrong with what was decided at one event."""
        for action in actions:
            if isinstance(action, OpenIncident):
                self._open(action)
            elif isinstance(action, CloseIncident):
                self.incident = ""
            elif isinstance(action, BeginGeneration):
                self._begin(action)
            elif isinstance(action, EvictMachine):
                self._evicted += 1
            elif isinstance(action, TakeRung):
                yield from self._take(action, actions, policy)
            elif isinstance(action, StartRanks) and not self._started:
                yield from self._start(action)

    def _open(self, action: OpenIncident) -> None:
        self.incident = action.incident
        self._heights.clear()
        self.rollbacks = self._evicted = 0

    def _begin(self, action: BeginGeneration) -> None:
        self._generation, self._planned = action.generation, action.planned
        self._taken.clear()
        self._started = False

    def _start(self, action: StartRanks) -> Iterator[str]:
        """Whatever failed, exactly one thing is done about it."""
        self._started, self._compared = True, False
        wanted = 1 if self.incident else 0
        if len(self._taken) != wanted:
            rungs = ", ".join(taken.rung for taken in self._taken) or "none"
            yield f"StartRanks {action.id} follows {len(self._taken)} rungs ({rungs}), not {wanted}"

    def _take(
        self, action: TakeRung, together: Sequence[ControllerAction], policy: PolicySpec
    ) -> Iterator[str]:
        name, rung = f"TakeRung {action.id} ({action.rung})", action.rung
        if action.incident != self.incident:
            yield f"{name} is of {action.incident}, and {self.incident or 'none'} is open"
        if rung in NOT_YET:
            yield f"{name} cannot be taken yet"
        if rung is Rung.AGGREGATE:
            self._compared = True
            if not self._started:
                yield f"{name} comes while no ranks run"
            return
        if rung is Rung.HUMAN:
            if not any(isinstance(other, FinishJob) for other in together):
                yield f"{name} does not end the job"
            return
        if self._started:
            yield f"{name} comes after the ranks of generation {self._generation} were started"
        self._taken.append(action)
        yield from self._evict(rung, name)
        yield from self._height(action, name)
        if rung is Rung.ROLLBACK and self._planned is None:
            yield from self._roll_back(action, name, together, policy)

    def _evict(self, rung: Rung, name: str) -> Iterator[str]:
        if rung in EVICTIONS and not self._evicted:
            yield f"{name}, and nobody was evicted in {self.incident}"
        if rung is Rung.EVICT_AGGREGATED and not self._compared:
            yield f"{name}, and no stacks were compared since ranks were started"

    def _height(self, action: TakeRung, name: str) -> Iterator[str]:
        """It falls to evictions, and where people changed something."""
        if action.rung in CHANGES or self._planned is not None:
            self._heights.clear()
            return
        height, failure = HEIGHT[action.rung], action.failure
        stood = self._heights.get(failure, 0)
        if action.rung is Rung.REATTEMPT:  # what is left where nothing higher can be taken
            height = max(height, stood)
        if height < stood and action.rung not in EVICTIONS:
            yield f'{name} has height {height}, and "{failure}" stood at {stood}'
        self._heights[failure] = height

    def _roll_back(
        self,
        action: TakeRung,
        name: str,
        together: Sequence[ControllerAction],
        policy: PolicySpec,
    ) -> Iterator[str]:
        self.rollbacks += 1
        if self.rollbacks > policy.rollbacks_max:
            yield f"{name} is rollback {self.rollbacks} of {self.incident}"
        switches = [other for other in together if isinstance(other, SwitchCode)]
        if not any(other.rolled_back and other.cause == action.id for other in switches):
            yield f"{name} does not change the code"
