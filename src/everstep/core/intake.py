"""In front of the controller's core: folds all machines' progress into one fact a second.

And what they tell of their parallel groups into one fact per generation, and of training's numbers
into a fact for each that is abnormal. controller/loop.py and sim/loop.py hand it what is Folded,
and give what comes back to the core (and only that to the journal). It holds no decision and may be
lost: a restarted controller fills it again within a second (what is normal, within a minute of
training). Liveness of connections is the link's matter (wire.py).
"""

from __future__ import annotations

from collections import deque

from everstep.core.numbers import NumbersJudge
from everstep.core.seen import united
from everstep.events import (
    Folded,
    GroupsSeen,
    MachineGroups,
    MachineProgress,
    MetricAbnormal,
    StepProgress,
)
from everstep.model import NO_GENERATION, NO_STEP, Generation, MachineId, Seconds, Step
from everstep.sightings import MachineActivity, MachineNumbers, MachineStacks

EVERY_S: Seconds = 1.0
"""At most one StepProgress a second, except the first of a generation."""


class Intake:
    """All machines' newest progress of the newest generation."""

    def __init__(self, machines: int) -> None:
        """`machines`: number of positions; nothing is known of all ranks before all reported."""
        self._machines = machines
        self._generation: Generation = NO_GENERATION
        self._newest: dict[MachineId, tuple[MachineProgress, Seconds]] = {}
        self._told: Step = NO_STEP
        self._told_at: Seconds = float("-inf")
        self._changed = False
        self._judge = NumbersJudge()
        self._abnormal: deque[MetricAbnormal] = deque()
        self._groups: dict[MachineId, MachineGroups] = {}
        self._groups_told: GroupsSeen | None = None

    def expect(self, machines: int) -> None:
        """So many positions from now on. Before reports of the generation that has them."""
        self._machines = machines

    def take(
        self, report: Folded, now: Seconds
    ) -> StepProgress | GroupsSeen | MetricAbnormal | None:
        """Take what a machine said; the fact to give to the core, if one is due."""
        if isinstance(report, MachineGroups):
            return self.groups(report)
        if isinstance(report, MachineStacks | MachineActivity):
            return None
        if isinstance(report, MachineNumbers):
            self._abnormal.extend(self._judge.take(report))
            return self.next_fact(now)
        return self.report(report, now)

    def groups(self, report: MachineGroups) -> GroupsSeen | None:
        """Take one machine's groups; the fact to give to the core once all have told the same
        generation's, and again only if it has become another.
        """
        newest = max((each.generation for each in self._groups.values()), default=NO_GENERATION)
        if report.generation < newest:
            return None
        if report.generation > newest:
            self._groups.clear()
        self._groups[report.machine] = report
        if len(self._groups) < self._machines:
            return None
        fact = GroupsSeen(
            generation=report.generation,
            seen=united(each.seen for each in self._groups.values()),
        )
        if fact == self._groups_told:
            return None
        self._groups_told = fact
        return fact

    def next_fact(self, now: Seconds) -> StepProgress | MetricAbnormal | None:
        """The fact to give to the core now: first what is abnormal."""
        return self._abnormal.popleft() if self._abnormal else self.due(now)

    def report(self, progress: MachineProgress, now: Seconds) -> StepProgress | None:
        """Take one machine's report; the fact to give to the core, if one is due."""
        if progress.generation < self._generation:
            return None
        if progress.generation > self._generation:
            self._generation = progress.generation
            self._newest.clear()
            self._told = NO_STEP
        self._newest[progress.machine] = (progress, now)
        self._changed = True
        return self.due(now)

    def due(self, now: Seconds) -> StepProgress | None:
        """How far all are, if there is news and its time has come."""
        deadline = self._fold_at()
        if deadline is None or now < deadline:
            return None
        return self._fold(now)

    def next_deadline(self) -> Seconds | None:
        """When next_fact() will have something to say; None: when a report comes."""
        return float("-inf") if self._abnormal else self._fold_at()

    def _fold_at(self) -> Seconds | None:
        if not self._changed or len(self._newest) < self._machines:
            return None
        return float("-inf") if self._told == NO_STEP else self._told_at + EVERY_S

    def _fold(self, now: Seconds) -> StepProgress:
        slowest, received = min(self._newest.values(), key=lambda entry: entry[0].slowest)
        step_times = [p.step_s for p, _ in self._newest.values() if p.step_s is not None]
        losses = [p.loss for p, _ in self._newest.values() if p.loss is not None]
        self._told, self._told_at, self._changed = slowest.slowest, now, False
        return StepProgress(
            generation=self._generation,
            finished_by_all=slowest.slowest,
            finished_by_one=max(p.fastest for p, _ in self._newest.values()),
            step_s=max(step_times, default=None),
            age_s=slowest.age_s + (now - received),
            loss=losses[0] if losses else None,
        )
