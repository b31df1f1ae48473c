"""In front of the controller's core: folds all machines' progress into one fact a second.

And what they tell of their parallel groups into one fact per generation, of training's numbers into
a fact for each that is abnormal, of their work into one if a rank holds up all others, of ranks
that do nothing into how long all have been quiet, and answers to a look at stacks into few
(folding.py).
controller/loop.py and sim/loop.py hand it what is Folded, and give what comes back to the core (and
only that to the journal). It holds no decision and may be lost: a restarted controller fills it
again within a second (what is normal, within a minute of training). Liveness of connections is the
link's matter (wire.py).
"""

from __future__ import annotations

from collections import deque

from everstep.core.folding import Folding
from everstep.core.groups import Layout
from everstep.core.layouts import known_from
from everstep.core.numbers import NumbersJudge
from everstep.core.phases import foremost
from everstep.core.quietness import AllQuiet
from everstep.core.seen import united
from everstep.core.straggling import Stragglers
from everstep.events import (
    Folded,
    GroupsSeen,
    MachineGroups,
    MachineProgress,
    MetricAbnormal,
    StepProgress,
)
from everstep.model import (
    NO_GENERATION,
    NO_STEP,
    Generation,
    JobSpec,
    MachineId,
    Seconds,
    Step,
)
from everstep.sightings import (
    ActivitySeen,
    MachineActivity,
    MachineNumbers,
    MachineStacks,
    StacksTaken,
    StragglerSeen,
)

Made = StepProgress | GroupsSeen | MetricAbnormal | StragglerSeen | StacksTaken | ActivitySeen
"""Events that come of what machines tell."""
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
        self._unstepped: set[MachineId] = set()
        """Machines with a rank that has finished no step in this generation."""
        self._judge = NumbersJudge()
        self._ready: deque[MetricAbnormal | StragglerSeen] = deque()
        self._job: JobSpec | None = None
        self._stragglers = Stragglers()
        self._quiet = AllQuiet()
        self._stacks = Folding(machines)
        self._groups: dict[MachineId, MachineGroups] = {}
        self._groups_told: GroupsSeen | None = None
        self._groups_world = 0
        """Of how many ranks they are."""

    def expect(self, job: JobSpec) -> None:
        """So many positions, and this layout, from now on. Before reports of the generation that
        has them.
        """
        self._machines, self._job = job.nnodes, job
        self._stacks.machines = job.nnodes

    def take(self, report: Folded, now: Seconds) -> Made | None:
        """Take what a machine said; the fact to give to the core, if one is due."""
        if isinstance(report, MachineGroups):
            return self.groups(report)
        if isinstance(report, MachineStacks):
            self._stacks.take(report, now)
            return self.next_fact(now)
        if isinstance(report, MachineActivity):
            return self._quiet.take(report, self._machines, now)
        if isinstance(report, MachineNumbers):
            self._ready.extend(self._judge.take(report))
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
        self._groups_world = 0 if self._job is None else self._job.world_size
        return fact

    def next_fact(self, now: Seconds) -> Made | None:
        """The fact to give to the core now: first what is abnormal and who is slow, then what
        stacks show.
        """
        if self._ready:
            return self._ready.popleft()
        return self._stacks.due(now) or self.due(now) or self._quiet.due(self._machines, now)

    def report(self, progress: MachineProgress, now: Seconds) -> StepProgress | None:
        """Take one machine's report; the fact to give to the core, if one is due."""
        if progress.generation < self._generation:
            return None
        if progress.generation > self._generation:
            self._generation = progress.generation
            self._newest.clear()
            self._unstepped.clear()
            self._told, self._told_at = NO_STEP, float("-inf")
        (self._unstepped.add if progress.slowest == NO_STEP else self._unstepped.discard)(
            progress.machine
        )
        self._newest[progress.machine] = (progress, now)
        self._stragglers.take(progress)
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
        if self._ready:
            return float("-inf")
        moments = (self._stacks.next_deadline(), self._fold_at(), self._quiet.next_deadline())
        return min((each for each in moments if each is not None), default=None)

    def _fold_at(self) -> Seconds | None:
        if not self._changed or len(self._newest) < self._machines:
            return None
        first = self._told == NO_STEP and not self._unstepped
        return float("-inf") if first else self._told_at + EVERY_S

    def _fold(self, now: Seconds) -> StepProgress:
        slowest, received = min(self._newest.values(), key=lambda entry: entry[0].slowest)
        step_times = [p.step_s for p, _ in self._newest.values() if p.step_s is not None]
        losses = [p.loss for p, _ in self._newest.values() if p.loss is not None]
        step_s = max(step_times, default=None)
        self._told, self._told_at, self._changed = slowest.slowest, now, False
        straggler = self._stragglers.judge(self._layout(), slowest.slowest, step_s, now)
        if straggler is not None:
            self._ready.append(straggler)
        phases = ((p.phase, p.phase_s + (now - at)) for p, at in self._newest.values())
        phase, phase_s = foremost(phases)
        return StepProgress(
            generation=self._generation,
            finished_by_all=slowest.slowest,
            finished_by_one=max(p.fastest for p, _ in self._newest.values()),
            step_s=step_s,
            age_s=slowest.age_s + (now - received),
            loss=losses[0] if losses else None,
            attached=any(p.attached for p, _ in self._newest.values()),
            phase=phase,
            phase_s=phase_s,
        )

    def _layout(self) -> Layout | None:
        """As the core knows it, of groups of the same number of ranks."""
        job, told = self._job, self._groups_told
        if job is None:
            return None
        seen = told.seen if told is not None and self._groups_world == job.world_size else None
        return known_from(job.layout, seen, job.world_size, job.nproc_per_node).layout
