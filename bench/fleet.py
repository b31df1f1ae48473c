"""Jobs with one rank on each stand-in machine, and the four ways to bring one of them back.

Used by bench/recovery.py. Each way is done to a job that is at rest (proven, backed up, launchers
warm) and answers with a Recovery: the seconds from the decision to the first step that every rank
finished anew, and what they were spent on, by the controller's journal and the ranks' own marks.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from launched import HERE, Everstep, Mark, Program

from everstep.actions import BeginGeneration, StartRanks, StopRanks
from everstep.events import (
    ControllerStarted,
    MachineJoined,
    RanksStopped,
    StepBackedUp,
    StepPublished,
    StopRequested,
    UpdateRequested,
    VersionHeld,
    VersionTried,
)
from everstep.journal.records import Record
from everstep.model import MachineId
from everstep.paths import MachinePaths
from everstep.processes import descendants, read_pid_file, send_signal, snapshot

SCRIPT = "recovery_script.py"
SETTLED = 30
"""Steps before a job is touched: past the proof of a restart, which takes 10, and a backup."""
SCRIPT_EVENTS = ("imports", "rendezvous", "restored")
"""Marks of the script between its first line and its first step; each ends a phase of its name."""


class Recovery(NamedTuple):
    """One recovery."""

    total_s: float
    """From the decision to the first step that every rank finished anew."""
    before: dict[str, float]
    """Seconds of what came before the decision."""
    phases: dict[str, float]
    """Seconds, in the order in which they were spent; they add up to `total_s`."""
    redone: int
    """Steps that were finished before and had to be done again."""

    @property
    def from_cause_s(self) -> float:
        """From what made the decision necessary: a kill, a request."""
        return self.total_s + sum(self.before.values())


class NotThere(Exception):
    """Not a thing that this everstep can do; the message says what it answered."""


class Fleet(Everstep):
    """A job of so many stand-ins with one rank each. All fleets save the same way."""

    def __init__(self, directory: Path, code: Path, machines: int, standbys: int) -> None:
        """`code`: directory with the script, as `editions` makes it."""
        self.machines = machines
        self.standbys = standbys
        self.checkpoints = directory.parent / "checkpoints"
        flags = ("--standbys", str(standbys), "--checkpoint-dir", str(self.checkpoints))
        program = Program(str(code / SCRIPT), (), machines)
        super().__init__(directory, program, (*flags, "--disk-every", "200"))

    def settle(self) -> None:
        """Wait until the newest incarnation has proven itself and nothing is under way any more."""
        self.wait_steps(self.restarts(), SETTLED)
        self.wait(self._at_rest, "launchers warm with a rank forked ahead")
        if self.machines > 1:
            self.wait(self._backed_up, "backups of all ranks")

    def _at_rest(self) -> bool:
        """Whether every machine, standbys too, has a warm launcher with a rank forked ahead."""
        table = snapshot()
        resting = 0
        for machine in self._alive():
            launcher = read_pid_file(machine.pid_file("launcher"))
            if launcher is not None:
                inside = {p for p, entry in table.items() if entry.session == launcher.pid}
                resting += bool(inside - {launcher.pid})
        return resting >= self.machines + self.standbys

    def _alive(self) -> list[MachinePaths]:
        found = (self.job_directory / "machines").iterdir()
        return [MachinePaths(root) for root in found if not (root / "gone").exists()]

    def _backed_up(self) -> bool:
        records = self.journal()
        begun = [r.seq for r in records for a in r.actions if isinstance(a, StartRanks)]
        backed = {
            record.event.machine
            for record in records
            if record.seq > begun[-1] and isinstance(record.event, StepBackedUp)
        }
        return len(backed) == self.machines

    def machine_of(self, node_rank: int) -> MachineId:
        """Who has this position now."""
        starts = (a for r in self.journal() for a in r.actions if isinstance(a, StartRanks))
        return [start.machine for start in starts if start.node_rank == node_rank][-1]

    def lose(self, machine: MachineId) -> float:
        """Kill it whole, as a machine without power is gone; the moment before that."""
        keeper = read_pid_file(
            MachinePaths(self.job_directory / "machines" / machine).pid_file("keeper")
        )
        assert keeper is not None, "it trains"
        at_s = time.monotonic()
        for process in (keeper, *descendants([keeper])):
            send_signal(process, signal.SIGKILL)
        return at_s

    def command(self, command: str, *words: str) -> None:
        """Run one of everstep's commands; NotThere with its last line if it fails."""
        path = self.directory / f"{command}-output"
        try:
            with path.open("wb") as output:
                self._everstep(output, command, *words)
        except subprocess.CalledProcessError as error:
            lines = path.read_text(errors="replace").strip().splitlines() or ["nothing"]
            raise NotThere(f"everstep {command} said: {lines[-1]}") from error

    def since(self, moment_s: float) -> list[Record]:
        """Records after this moment of the monotonic clock."""
        return [record for record in self.journal() if at(record) >= moment_s]


def at(record: Record) -> float:
    """When the record was made, by the monotonic clock that ranks write down."""
    # The controller counts from the wall clock at its start by the monotonic clock.
    return record.time - (time.time() - time.monotonic())


def editions(directory: Path, number: int) -> Path:
    """A directory with the script and what it imports, as edition `number` of the code."""
    code = directory / f"code-{number}"
    code.mkdir(parents=True)
    text = (HERE / SCRIPT).read_text()
    (code / SCRIPT).write_text(text.replace("EDITION = 0", f"EDITION = {number}"))
    shutil.copy(HERE / "marks.py", code)
    return code


# --- the four ways -------------------------------------------------------------------------------


def hot_update(job: Fleet, code: Path, edition: int) -> Recovery:
    """Other code on the same machines: `everstep update`. NotThere without that command."""
    before = job.restarts()
    asked_s = time.monotonic()
    job.command("update", str(code), "bench", "--urgent", "--no-wait", "--json")
    _wait_new_step(job, before)
    assert job.restarted(f"edition-{edition}", before), "the new code runs"
    records = job.since(asked_s)
    decided_s = at(_first(records, _begins))
    ends = {
        "uploaded": at(_first(records, _is(UpdateRequested))),
        "spread": max(_all(records, VersionHeld, until=decided_s), default=asked_s),
        "imported once": max(_all(records, VersionTried, until=decided_s), default=asked_s),
        "decided": decided_s,
    }
    stopped = {"step saved, stopped": 0.0}
    return _recovery(job, before, decided_s, _lasted(asked_s, ends), stopped)


def standby_swap(job: Fleet) -> Recovery:
    """A machine dies, a warm standby takes its position."""
    before, killed_s, records = _lose_one(job)
    decided_s = at(_first(records, _begins))
    ends = {"stopped, standby proven clean": 0.0}
    return _recovery(job, before, decided_s, {"noticed": decided_s - killed_s}, ends)


def reschedule(job: Fleet) -> Recovery:
    """A machine dies, and there is no standby: one is asked for and started cold."""
    before, killed_s, records = _lose_one(job)
    decided_s = at(_first(records, _begins))
    ends = {
        "stopped": _stopped(records),
        "machine started": max(_all(records, MachineJoined)),
        "proven clean, code held": 0.0,
    }
    return _recovery(job, before, decided_s, {"noticed": decided_s - killed_s}, ends)


def _lose_one(job: Fleet) -> tuple[int, float, list[Record]]:
    """Its restarts before that, when the machine was killed, and the records since then."""
    before = job.restarts()
    killed_s = job.lose(job.machine_of(job.machines - 1))
    _wait_new_step(job, before)
    return before, killed_s, job.since(killed_s)


def requeue(job: Fleet, again: Fleet, ending: ExitStack) -> Recovery:
    """Stop everything, then start the job anew from its checkpoint on disk.

    `again` is started, and runs until `ending` does. From the moment that the controller knew of
    the request to stop: what the command itself takes is not counted.
    """
    asked_s = time.monotonic()
    last_step = min(job.last_step(rank, job.restarts()) for rank in range(job.machines))
    job.command("stop", "bench")
    job.wait((job.job_directory / "result.json").exists, "end of the job")
    old = job.since(asked_s)
    ending.enter_context(again)
    _wait_new_step(again, -1)
    decided_s = at(_first(old, _is(StopRequested)))
    new = again.journal()
    ends = {
        "stopped": _stopped(old),
        "last step to disk": max(_all(old, StepPublished), default=0.0),
        "machines released": at(old[-1]),
        "command, controller": at(_first(new, _is(ControllerStarted))),
        "machines started": max(_all(new, MachineJoined)),
        "proven clean, code held": 0.0,
    }
    found = _recovery(again, -1, decided_s, {"command": decided_s - asked_s}, ends)
    first = again.reached("restored", 0)
    assert first is not None, "the first step comes last"
    return found._replace(redone=max(0, last_step + 1 - min(mark.step for mark in first)))


# --- where the time went -------------------------------------------------------------------------


def _wait_new_step(job: Fleet, before: int) -> None:
    job.wait(lambda: job.restarted("step", before), "step of the next incarnation")


def _recovery(
    job: Fleet, before: int, decided_s: float, ahead: dict[str, float], ends: dict[str, float]
) -> Recovery:
    """From the ends of what the controller's journal tells, and the slowest rank's marks.

    The last of `ends` is the order to start ranks, whatever stands there.
    """
    steps = job.restarted("step", before)
    assert steps is not None, "waited for"
    restart = steps[0].restart
    starts = [
        at(record)
        for record in job.journal()
        for action in record.actions
        if isinstance(action, StartRanks) and action.restarts == restart
    ]
    ends[list(ends)[-1]] = starts[-1]
    ends["fetched, forked"] = _latest(job.reached("script", restart))
    ends |= {event: _latest(job.reached(event, restart)) for event in SCRIPT_EVENTS}
    ends["first step"] = _latest(steps)
    done = (
        min(job.last_step(rank, before) for rank in range(job.machines)) + 1 if before >= 0 else 0
    )
    return Recovery(
        total_s=_latest(steps) - decided_s,
        before=ahead,
        phases=_lasted(decided_s, ends),
        redone=max(0, done - min(mark.step for mark in steps)),
    )


def _stopped(records: Sequence[Record]) -> float:
    """When the last of those that were ordered to stop at the decision had."""
    begun = _first(records, _begins)
    ids = {action.id for action in begun.actions if isinstance(action, StopRanks)}
    ended = [
        at(record)
        for record in records
        if isinstance(record.event, RanksStopped) and record.event.action in ids
    ]
    return max(ended)


def _lasted(begun_s: float, ends: dict[str, float]) -> dict[str, float]:
    """How long each took. What ended before its predecessor did took no time."""
    lasted = {}
    for name, end_s in ends.items():
        lasted[name] = max(0.0, end_s - begun_s)
        begun_s = max(begun_s, end_s)
    return lasted


def _latest(marks: list[Mark] | None) -> float:
    assert marks is not None, "the first step comes last"
    return max(mark.at_ns for mark in marks) / 1e9


def _first(records: Sequence[Record], holds: Callable[[Record], bool]) -> Record:
    return next(record for record in records if holds(record))


def _begins(record: Record) -> bool:
    return any(isinstance(action, BeginGeneration) for action in record.actions)


def _is(kind: type[Any]) -> Callable[[Record], bool]:
    return lambda record: isinstance(record.event, kind)


def _all(records: Sequence[Record], kind: type[Any], until: float = float("inf")) -> list[float]:
    return [at(r) for r in records if isinstance(r.event, kind) and at(r) <= until]
