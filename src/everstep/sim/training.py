"""Models synchronous training: the ranks of one generation step together and save every step.

A step is one all-reduce that every rank must reach; then each finishes its optimizer update in its
own time, and saves in the background. The next update waits for the save of the one before. When a
rank is gone, its peers come no further: some fail with a broken connection, some wait for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import NamedTuple

from everstep.actions import StartRanks
from everstep.model import (
    NO_STEP,
    ExitStatus,
    JobSpec,
    Rank,
    RankError,
    Seconds,
    Step,
    VersionId,
)
from everstep.sim.code import CRASH, NOT_FOUND, WRONG_CALL, Flaw
from everstep.sim.disk import LocalDisk
from everstep.sim.memory import RankMemory
from everstep.sim.options import Options, Script
from everstep.sim.schedule import Schedule

ECHO = RankError(
    kind="RuntimeError", message="Connection closed by peer", traceback="Traceback: closed by peer"
)
"""What gloo raises in a rank whose peer is gone."""


RAISED = RankError(kind="ValueError", message="wrong", traceback="Traceback: ValueError: wrong")
"""What a broken script raises."""
QUITS_AT = Step(10)
TRY_AGAIN_S: Seconds = 0.5


class _Finish(NamedTuple):
    step: Step
    at: Seconds


class Start(NamedTuple):
    """What a generation begins with, besides its order."""

    job: JobSpec
    """As it is in this generation."""
    version: VersionId
    flaws: tuple[Flaw, ...]
    """Of that version."""
    spoiled: bool
    """There is nan in the step that it restores."""


class Process:
    """One rank's process."""

    def __init__(
        self, order: StartRanks, rank: Rank, memory: RankMemory, local_disk: LocalDisk
    ) -> None:
        self.rank = rank
        self.machine = order.machine
        self.generation = order.generation
        self.version = order.version
        self.pid = 0
        self.slowness = 1.0
        self.step_s: Seconds | None = None
        """Duration of its newest step."""
        self.exit: ExitStatus | None = None
        self.error: RankError | None = None
        self.died_at: Seconds = 0.0
        self.stuck = False
        """In uninterruptible sleep: SIGKILL does nothing."""
        self.memory = memory
        self.restores = rank
        """Whose shard it goes on with."""
        self.source = memory
        """Where that lies, if it lies in memory."""
        self.beside: Mapping[Rank, RankMemory] = {}
        """All slots on its machine."""
        self.local_disk = local_disk
        self.on_end: Callable[[Process], None] = lambda _: None
        self.linked: Callable[[], bool] = lambda: True
        """Whether its peers reach it."""
        self._finishes: deque[_Finish] = deque(maxlen=3)

    @property
    def alive(self) -> bool:
        return self.exit is None

    def will_finish(self, step: Step, at: Seconds) -> None:
        self._finishes.append(_Finish(step, at))

    def finished(self, now: Seconds) -> tuple[Step, Seconds]:
        """Newest step whose optimizer update it finished, and when; NO_STEP if none."""
        until = now if self.alive else min(now, self.died_at)
        done = [finish for finish in self._finishes if finish.at <= until]
        return (done[-1].step, done[-1].at) if done else (NO_STEP, 0.0)


class Gang:
    """All processes of one generation."""

    def __init__(
        self, order: StartRanks, start: Start, options: Options, schedule: Schedule
    ) -> None:
        """`order`: the first of its orders; others may differ only in their machine."""
        self.generation = generation = order.generation
        self.restore = restore = order.restore
        self.goes_back = order.compare_through != NO_STEP
        """It was told to do steps again that were done well."""
        self.start = start
        self.job = start.job
        self.nan_from: Step | None = None
        """First step with a loss that is not finite."""
        self.processes: dict[Rank, Process] = {}
        self.began = False
        """Whether all ranks met and restored."""
        self.newest: Step = restore
        """Newest step that its all-reduce made possible."""
        self.on_begin: Callable[[Gang], None] = lambda _: None
        self.on_step: Callable[[Gang, Seconds], None] = lambda _, __: None
        self._options = options
        self._schedule = schedule
        self._broken = False
        self._crashes_at: Step | None = None
        self._reduced_at: Seconds = 0.0
        # A generator of its own: what one gang does must not change what another one draws.
        self._rng = Random(f"{options.seed} {generation}")  # noqa: S311 -- a printed seed

    @property
    def whole(self) -> bool:
        return all(process.alive for process in self.processes.values())

    def add(self, process: Process) -> None:
        """A forked rank. The last one lets the training begin."""
        self.processes[process.rank] = process
        if Flaw.NO_IMPORT in self.start.flaws:
            self._raises(process, NOT_FOUND)
            return  # before it meets the others
        if self._broken:
            self._notice(process)
        elif len(self.processes) == self.job.world_size:
            self._schedule.after(self._rng.uniform(0.1, 2.0), self._begin)

    def ended(self, process: Process) -> None:
        """A rank's process is gone: its peers notice, or do not."""
        over = self.newest == self._options.steps - 1
        if process.exit is not None and process.exit.ok and over:
            return
        self._broken = True
        if Flaw.NO_IMPORT in self.start.flaws:
            return  # each by itself: nobody was connected yet
        for peer in self.processes.values():
            self._notice(peer)

    def _notice(self, peer: Process) -> None:
        """The connection to a dead rank breaks, and the peer dies of it or waits for ever."""
        if peer.alive and self._rng.random() >= self._options.hang:
            dies_s = self._rng.uniform(0.01, 1.0)
            self._schedule.after(dies_s, partial(self.end, peer, ExitStatus(code=1), ECHO))

    def end(self, process: Process, status: ExitStatus, error: RankError | None = None) -> None:
        """The process ends now, for whatever reason."""
        if not process.alive:
            return
        process.died_at = self._schedule.now
        process.memory.cut(self._schedule.now)
        process.exit, process.error = status, error
        process.on_end(process)
        self.ended(process)

    def finished_by_all(self) -> Step:
        """The truth: newest step that every rank finished, `restore` if none of its own."""
        now = self._schedule.now
        return max(self.restore, min(p.finished(now)[0] for p in self.processes.values()))

    def _waits(self, call: Callable[[], None]) -> bool:
        """Whether all wait for one whose link is down; they try again."""
        waits = any(p.alive and not p.linked() for p in self.processes.values())
        if waits:
            self._schedule.after(TRY_AGAIN_S, call)
        return waits

    def _begin(self) -> None:
        if self._broken or not self.whole or self._waits(self._begin):
            return
        self.began = True
        self.on_begin(self)
        self._reduced_at = self._schedule.now
        raises = Flaw.RAISES in self.start.flaws
        if raises or self._options.script is Script.RAISES:
            for process in self.processes.values():
                self._raises(process, WRONG_CALL if raises else RAISED)
        else:
            self._spoil()
            self._schedule.after(self._compute_s(), self._reduce)

    def _raises(self, process: Process, error: RankError) -> None:
        fail = partial(self.end, process, ExitStatus(code=1), error)
        self._schedule.after(self._rng.uniform(0.0, 1.0), fail)

    def _spoil(self) -> None:
        """When what is wrong with the code will show."""
        if self.start.spoiled:
            self.nan_from = Step(self.newest + 1)
        elif Flaw.NAN in self.start.flaws:
            self.nan_from = Step(self.newest + self._rng.randint(1, 6))
        if Flaw.CRASHES in self.start.flaws:
            after = self._rng.expovariate(1.0 / self._options.crash_after)
            self._crashes_at = Step(self.newest + 1 + int(after))

    def _compute_s(self) -> Seconds:
        """All wait for the slowest."""
        jitter = self._options.jitter
        slowest = max(process.slowness for process in self.processes.values())
        return self._options.step_s * slowest * self._rng.uniform(1.0 - jitter, 1.0 + jitter)

    def _reduce(self) -> None:
        """Every rank is here: this step will be finished by whoever lives on."""
        if self._broken or not self.whole or self._waits(self._reduce):
            return
        if self.newest == self._options.steps - 1:
            self._finish()
            return
        self.newest = Step(self.newest + 1)
        last = self._schedule.now
        if self._options.script is not Script.UNATTACHED:
            last = max(self._plan(process) for process in self.processes.values())
        self.on_step(self, self._schedule.now - self._reduced_at)
        self._reduced_at = self._schedule.now
        self._schedule.at(last + self._compute_s(), self._reduce)
        if self._crashes_at is not None and self.newest >= self._crashes_at:
            crashes = self._rng.choice(list(self.processes.values()))
            self._schedule.at(last, partial(self.end, crashes, CRASH))
        if self._options.script is Script.QUITS_EARLY and self.newest >= QUITS_AT:
            self.end(self.processes[Rank(0)], ExitStatus(code=0))

    def _plan(self, process: Process) -> Seconds:
        """When this rank finishes the step, after its former save; its save is planned, too."""
        options, now = self._options, self._schedule.now
        process.memory.settle(now)
        updated = now + self._rng.uniform(0.0, options.jitter) * options.step_s
        at = max(updated, process.memory.free_at)
        process.will_finish(self.newest, at)
        process.step_s = now - self._reduced_at
        save_s = options.save_s * process.slowness * self._rng.uniform(1.0, 1.0 + options.jitter)
        process.memory.plan_save(self.newest, self.generation, at, at + save_s)
        return at

    def _finish(self) -> None:
        """All steps are done: every rank waits for its last save and leaves."""
        for process in self.processes.values():
            at = max(self._schedule.now, process.memory.free_at) + self._rng.uniform(0.0, 1.0)
            self._schedule.at(at, partial(self.end, process, ExitStatus(code=0)))
