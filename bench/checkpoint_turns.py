"""The two jobs of bench/checkpoint.py, and what is done with them turn by turn.

One is everstep's, on two stand-in machines; the other one is torchrun's, where all rivals save.
Both run checkpoint_script.py, and while one works the other one waits without using a processor.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from directed import Directed, Step, Turn
from launched import Everstep, Job, Program, Torchrun
from loopback import throughput
from orders import Copied, Order, Restored

from everstep.actions import BackUpStep
from everstep.events import BackupFailed, StepBackedUp

RANKS = 2
SHM = Path("/dev/shm")
BACKUP_EVERY = 2
"""Fewest steps from one backup step to the next: many more backups than the default of 10 gives."""
PROBE_STEPS, PROBE_UNITS = 3, 100
"""To see what a unit of extra work takes here."""
WARM_BACKUPS = 2
"""Then both places for received shards are in use: their memory is there."""
UNPACED_BACKUPS = 1
COPIES = 3
"""Plain copies of memory after each kill."""
NONE = "none"
EVERSTEP = "everstep"


FLAGS = ("--backup-every", str(BACKUP_EVERY))


class Sizes(NamedTuple):
    """Of the model, on each rank."""

    layers: int
    width: int


class Counts(NamedTuple):
    """Steps in one turn. The first of them does not count."""

    none: int
    saved: int
    rival: int
    before_kill: int


class Seen(NamedTuple):
    """One way to save, in one round."""

    blocked_s: float
    slowdown_s: float
    """What a step with a save takes more than one without."""
    ratio: float
    queued_s: float


class Backup(NamedTuple):
    """One backup step of the whole job."""

    step: int
    begun: float
    """Wall clock: the first machine's first byte."""
    ended: float
    """The last machine's last acknowledgement."""
    total_bytes: int

    def during(self, step: Step) -> bool:
        return self.begun < step.begun + step.step_s and step.begun < self.ended

    @property
    def bytes_per_s(self) -> float:
        return self.total_bytes / (self.ended - self.begun)


class Kill(NamedTuple):
    """One kill -9 and what came of it; times of the slowest rank."""

    restore_s: float
    """The script's call of restore()."""
    steps_lost: int
    memcpy_s: float
    """A plain copy of the same bytes by one thread, right after that."""
    memcpy_fresh_s: float
    """The same into memory that is new."""


class EverstepRound(NamedTuple):
    """What one round of everstep's job showed."""

    seen: Seen
    """Of the steps without a backup under way."""
    backups: list[Backup]
    backup_adds_s: float | None
    """What a backup adds to the steps that it overlaps, together; None: there was none."""
    ratio_with_backups: float
    """Of all steps."""


class Transfers(NamedTuple):
    """Bytes per second in both directions together, of backups and of plain sockets."""

    backups: float
    sockets: float


def program(files: Path, memory: Path, sizes: Sizes) -> Program:
    """checkpoint_script.py as a Directed with the same `files` expects it."""
    words = ("--orders", files / "orders", "--told", files / "told", "--memory", memory)
    model = ("--layers", sizes.layers, "--width", sizes.width)
    return Program("checkpoint_script.py", tuple(map(str, words + model)), RANKS, 0)


class EverstepSide:
    """Everstep's job."""

    def __init__(self, job: Everstep, files: Path, counts: Counts) -> None:
        """`job`: one of program(files, ...), with FLAGS."""
        self.job = job
        self.directed = Directed(job, files)
        self._counts = counts

    def unit_s(self) -> tuple[float, float]:
        """What forward and backward take as they are, and what a unit of extra work adds."""
        plain = self._turn(NONE, 0, PROBE_STEPS).compute_s
        loaded = self._turn(NONE, PROBE_UNITS, PROBE_STEPS).compute_s
        return plain, (loaded - plain) / PROBE_UNITS

    def warm_up(self, units: int) -> None:
        """Until all memory that saves and backups use is faulted in."""
        turn = self.directed.begin(Order(saver=EVERSTEP, units=units))
        self.job.wait(lambda: len(self.backups()) >= WARM_BACKUPS, f"{WARM_BACKUPS} backups")
        self._turn(NONE, 0, 1)
        self.directed.finish(turn)
        self._wait_for_backups()

    def round(self, units: int) -> EverstepRound:
        """Steps without saves, with, without."""
        before = self._turn(NONE, units, self._counts.none)
        earlier = len(self.backups())
        saved = self._turn(EVERSTEP, units, self._counts.saved)
        self._wait_for_backups()
        after = self._turn(NONE, units, self._counts.none)
        none_s = mean((before.step_s, after.step_s))
        backups = self.backups()[earlier:]
        alone = [s for s in saved.steps if not any(backup.during(s) for backup in backups)]
        # With short steps a backup may last all the turn: then all that is known is with it.
        seen = seen_in(alone or saved.steps, none_s)
        adds_s = None
        if backups and alone:
            alone_s = median(step.step_s for step in alone)
            adds_s = sum(step.step_s - alone_s for step in saved.steps) / len(backups)
        ratio = mean(step.step_s for step in saved.steps) / none_s
        return EverstepRound(seen, backups, adds_s, ratio)

    def transfers(self, units: int, bytes_per_flow: int) -> Transfers:
        """Backups, and plain sockets, while the ranks train. Short steps: no backup is paced then,
        since half the time until the next one is less than it takes.
        """
        earlier = len(self.backups())
        turn = self.directed.begin(Order(saver=EVERSTEP, units=units))
        wanted = earlier + 1 + UNPACED_BACKUPS
        self.job.wait(lambda: len(self.backups()) >= wanted, f"{wanted} backups")
        training = self.directed.begin(Order(saver=NONE, units=units))
        self.directed.finish(turn)
        self._wait_for_backups()
        moved = throughput(bytes_per_flow)
        self._turn(NONE, 0, 1)
        self.directed.finish(training)
        # The first was still paced for the steps before.
        backups = self.backups()[earlier + 1 : wanted]
        return Transfers(median(backup.bytes_per_s for backup in backups), moved)

    def kill(self, rank: int) -> Kill:
        """Kill it at a random moment of a step, while all steps are saved."""
        job, before = self.job, self.job.restarts()
        done = job.steps(before)
        self.directed.begin(Order(saver=EVERSTEP))
        job.wait_steps(before, done + self._counts.before_kill)
        time.sleep(random.random() * 0.5)
        job.kill_rank(rank)
        job.wait(lambda: job.restarted("step", before) is not None, "step after the kill")
        marks = job.restarted("restored", before)
        assert marks is not None, "restored before it stepped"
        finished = min(job.last_step(each, before) for each in range(RANKS))
        copies: list[Copied] = []
        for _ in range(COPIES):
            self.directed.carry_out(Order(saver="copies"))
            newest = [told[-1] for told in self.directed.told(Copied)]
            copies.append(max(newest, key=lambda copied: copied.touched_s))
        return Kill(
            restore_s=max(told[-1].took_s for told in self.directed.told(Restored)),
            steps_lost=finished + 1 - max(mark.step for mark in marks),
            memcpy_s=median(copied.touched_s for copied in copies),
            memcpy_fresh_s=median(copied.fresh_s for copied in copies),
        )

    def backups(self) -> list[Backup]:
        """All that are whole, by the journal."""
        steps: dict[int, list[tuple[float, StepBackedUp]]] = {}
        for record in self.job.journal():
            if isinstance(record.event, StepBackedUp):
                steps.setdefault(record.event.step, []).append((record.time, record.event))
        return [
            Backup(
                step=step,
                begun=min(at - done.took_s for at, done in answers),
                ended=max(at for at, _ in answers),
                total_bytes=sum(done.sent_bytes for _, done in answers),
            )
            for step, answers in steps.items()
            if len(answers) == self.job.machines
        ]

    def backups_failed(self) -> list[str]:
        """Why."""
        events = [record.event for record in self.job.journal()]
        return [event.reason for event in events if isinstance(event, BackupFailed)]

    def shared_memory_bytes(self) -> dict[str, int]:
        """Of both machines: the ranks' own slots, and what is kept for peers."""
        uid = json.loads((self.job.job_directory / "spec.json").read_text())["uid"]
        sizes = {"slots": 0, "kept for peers": 0}
        for path in SHM.glob(f"everstep-bench-{uid}-*/**/slot-*"):
            kept = path.parent.parent.name == "backup"
            sizes["kept for peers" if kept else "slots"] += path.stat().st_blocks * 512
        return sizes

    def _wait_for_backups(self) -> None:
        """Of all steps that were saved."""
        self.job.wait(lambda: not self._backing_up(), "end of the backup")

    def _backing_up(self) -> bool:
        saved = self.job.last_step(0, self.job.restarts())
        waiting: set[str] = set()
        for record in self.job.journal():
            orders = [each for each in record.actions if isinstance(each, BackUpStep)]
            waiting |= {order.id for order in orders if order.step <= saved}
            if isinstance(record.event, StepBackedUp | BackupFailed):
                waiting.discard(record.event.action)
        return bool(waiting)

    def _turn(self, saver: str, units: int, steps: int) -> Turn:
        return self.directed.carry_out(Order(saver=saver, units=units, steps=steps))


class RivalSide:
    """The rivals' job."""

    def __init__(self, job: Torchrun, files: Path, counts: Counts) -> None:
        """`job`: one of program(files, ...)."""
        self.job = job
        self.directed = Directed(job, files)
        self._counts = counts
        self.missing: dict[str, str] = {}
        """Rivals that do not run here, and why."""
        self.memory: dict[str, int] = {}
        """What each takes of the ranks' memory beyond the state itself."""
        self._left_bytes = self._turn(NONE, 0, 2).left_bytes

    def round(self, units: int, savers: Sequence[str]) -> dict[str, Seen]:
        """Each rival's steps, and in the middle of them steps without saves."""
        tried = [saver for saver in savers if saver not in self.missing]
        half = len(tried) // 2
        turns = self._turns(units, tried[:half])
        none = self._turn(NONE, units, self._counts.none)
        turns |= self._turns(units, tried[half:])
        return {saver: seen_in(turn.steps, none.step_s) for saver, turn in turns.items()}

    def _turns(self, units: int, savers: Sequence[str]) -> dict[str, Turn]:
        turns = {}
        for saver in savers:
            turn = self._turn(saver, units, self._counts.rival)
            if turn.error:
                self.missing[saver] = turn.error
                continue
            self.memory.setdefault(saver, turn.memory_bytes - self._left_bytes)
            self._left_bytes = turn.left_bytes
            turns[saver] = turn
        return turns

    def dcp_load_s(self) -> float:
        """Of the slowest rank: what DCP takes to load what it saved last, from files in memory."""
        self.directed.carry_out(Order(saver="dcp_load"))
        return max(told[-1].took_s for told in self.directed.told(Restored))

    def _turn(self, saver: str, units: int, steps: int) -> Turn:
        return self.directed.carry_out(Order(saver=saver, units=units, steps=steps))


def started(*jobs: Job) -> None:
    """Wait until all ranks are ready for orders."""
    for job in jobs:
        job.wait(partial(job.reached, "restored", 0), "start")


def seen_in(steps: Sequence[Step], none_s: float) -> Seen:
    """`none_s`: what a step takes without saves."""
    step_s = median(step.step_s for step in steps)
    return Seen(
        blocked_s=median(step.blocked_s for step in steps),
        slowdown_s=step_s - none_s,
        ratio=step_s / none_s,
        queued_s=median(step.queued_s for step in steps),
    )
