"""Models synchronous training: the ranks of one generation step together and save every step.

A step is one all-reduce that every rank must reach; then each finishes its optimizer update in its
own time, and saves in the background. The next update waits for the save of the one before. When a
rank is gone, its peers come no further: some fail with a broken connection, some wait for ever. So
do all when one of them is held up, or goes another way in its code.
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
    MachineId,
    Rank,
    RankError,
    RankPhase,
    Seconds,
    Step,
    VersionId,
)
from everstep.sim.code import CRASH, NOT_FOUND, WRONG_CALL, Flaw
from everstep.sim.disk import LocalDisk
from everstep.sim.hanging import OF_MACHINES, Held, Hold, Pause, Pausing
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
        self.held: Held | None = None
        """What holds it up, or did so last."""
        self._finishes: deque[_Finish] = deque(maxlen=3)

    @property
    def alive(self) -> bool:
        return self.exit is None

    def hold(self, held: Held) -> None:
        """From now on it does nothing, and all others wait for it."""
        if self.alive and self.held_at(held.since) is None:
            self.held = held
            self.stuck = self.stuck or held.hold is Hold.KERNEL

    def held_at(self, now: Seconds) -> Hold | None:
        """What holds it up."""
        if not self.alive or self.held is None or now >= self.held.until:
            return None
        return self.held.hold

    def was_held(self, since: Seconds, holds: tuple[Hold, ...] = OF_MACHINES) -> bool:
        """Whether one of these held it up at some time since then."""
        until = self.held.until if self.held is not None else 0.0
        until = until if self.alive else min(until, self.died_at)
        return self.held is not None and self.held.hold in holds and until >= since

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
        self.broke_at: Seconds | None = None
        """When its first rank was gone."""
        self.pausing: Pausing | None = None
        """The newest healthy pause."""
        self.strayed_at: Seconds = 0.0
        self.strayed: tuple[Rank, ...] = ()
        """Ranks that went another way in their code, so that nobody will meet in a collective."""
        self._crashes_at: Step | None = None
        self._strays_at: Step | None = None
        self._reduced_at: Seconds = 0.0
        self._waiting_since: Seconds | None = None
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
        self.broke_at = self._schedule.now if self.broke_at is None else self.broke_at
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

    def holders(self, now: Seconds) -> list[Process]:
        """Those that all others wait for: held up, or their link is down."""
        processes = self.processes.values()
        return [p for p in processes if p.alive and (p.held_at(now) or not p.linked())]

    def stands(self, now: Seconds) -> bool:
        """Whether it comes no further by itself. Whoever is on the way comes to the wait first."""
        return bool(self._broken or self.strayed or self.holders(now))

    def phase_at(self, now: Seconds) -> tuple[RankPhase, Seconds]:
        """What its ranks say that they do, and for how long they have."""
        pausing = self.pausing
        attached = self._options.script is not Script.UNATTACHED
        if attached and pausing is not None and pausing.pause.declared and pausing.at(now):
            return pausing.pause.phase, now - pausing.since
        return (RankPhase.TRAINING if self.began else RankPhase.STARTING), 0.0

    def quiet_s(self, now: Seconds) -> Seconds:
        """For how long none of its ranks has done anything; 0: some do."""
        since = self._waiting_since
        if self._broken and self.broke_at is not None:
            since = self.broke_at if since is None else min(since, self.broke_at)
        return 0.0 if since is None else now - since

    def stood_since(self, now: Seconds) -> Seconds | None:
        """Since when somebody is held up, or has gone another way; None: nobody."""
        held = [p.held.since for p in self.holders(now) if p.held_at(now) and p.held is not None]
        return min([*held, *([self.strayed_at] if self.strayed else [])], default=None)

    @property
    def pauses_s(self) -> Seconds:
        """The longest one that its script makes."""
        return max((pause.takes_s for pause in self._options.pauses), default=0.0)

    def slower(self) -> list[MachineId]:
        """Machines that all others wait for in every step, maybe since they began."""
        fastest = min(process.slowness for process in self.processes.values())
        return [p.machine for p in self.processes.values() if p.slowness > fastest]

    def waits_for_slow(self, process: Process, now: Seconds) -> bool:
        """Whether it has computed its part of the step, and somebody slower has not."""
        slowest = max(each.slowness for each in self.processes.values())
        done_s = self._options.step_s * process.slowness
        return process.slowness < slowest and now - self._reduced_at > done_s

    def _waits(self, call: Callable[[], None]) -> bool:
        """Whether all wait for one that does not come; they try again."""
        waits = bool(self.strayed or self.holders(self._schedule.now))
        if not waits:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = self._schedule.now
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
            first = next((pause for pause in self._options.pauses if not pause.every), None)
            paused_s = self._pause(first, self._schedule.now)
            self._schedule.after(paused_s + self._compute_s(), self._reduce)

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
        if Flaw.STRAYS in self.start.flaws:
            self._strays_at = Step(self.newest + self._rng.randint(1, 6))

    def _pause(self, pause: Pause | None, since: Seconds) -> Seconds:
        """For how long the next step is put off."""
        if pause is None:
            return 0.0
        takes_s = pause.takes_s * self._rng.uniform(0.5, 1.0)
        self.pausing = Pausing(pause=pause, since=since, until=since + takes_s)
        return takes_s

    def _stray(self) -> None:
        """One rank, or half of them, skip a collective."""
        ranks = sorted(self.processes)
        count = self._rng.choice([1, max(1, len(ranks) // 2)])
        self.strayed_at = self._schedule.now
        self.strayed = tuple(self._rng.sample(ranks, count))

    def _compute_s(self) -> Seconds:
        """All wait for the slowest."""
        jitter = self._options.jitter
        slowest = max(process.slowness for process in self.processes.values())
        return self._options.step_s * slowest * self._rng.uniform(1.0 - jitter, 1.0 + jitter)

    def _reduce(self) -> None:
        """Every rank is here: this step will be finished by whoever lives on."""
        if self._strays_at is not None and self.newest >= self._strays_at and not self.strayed:
            self._stray()
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
        pauses = (p for p in self._options.pauses if p.comes_after(self.newest))
        paused_s = self._pause(next(pauses, None), last)
        self._schedule.at(last + paused_s + self._compute_s(), self._reduce)
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
