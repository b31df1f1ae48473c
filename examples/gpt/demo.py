"""`make demo`: trains the GPT on four stand-in machines and breaks each part of everstep once.

It starts train.py by `everstep run`, injects five faults by `everstep inject`, each after the one
before is proven recovered, and then runs the same training undisturbed under plain torchrun. The
losses of all steps and the trained parameters must be the same, bit for bit. It ends with a table
of what each fault cost, and fails if anything is not as promised. It leaves nothing behind, also
after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from everstep.cluster.cleanup import clean_job
from everstep.commands import offline, tables
from everstep.commands.client import Away, Client
from everstep.commands.jobs import result_of, spec_of
from everstep.controller.views import IncidentsView, IncidentView, StatusView
from everstep.model import EverstepError, Fault, MachineId
from everstep.paths import SHM_ROOT, JobPaths, shm_dir
from everstep.processes import Process, descendants, identify, read_pid_file, send_signal, wait_gone

TRAIN = Path(__file__).with_name("train.py")
MACHINES, RANKS_EACH = 4, 2
STEPS_PER_CORE = 300
"""Enough for half a minute, in which the five faults have to happen; eight cores are all used."""
DISK_EVERY = 25
"""Steps between two copies to disk: what the loss of a machine may cost here."""
FURTHER_STEPS = 10
"""Steps after a fault that prove that training goes on."""
PATIENCE_S = 90.0
POLL_S = 0.1
GONE_WITHIN_S = 20.0
LEAVE_S = 10.0
"""Time for the last processes to end after the job said how it ended."""
SAY_S = 5.0
"""Seconds between two lines of progress where the output is no terminal."""


class Break(NamedTuple):
    """One fault of the demo."""

    fault: Fault
    target: tuple[str, ...]
    """Flags of `everstep inject`."""
    service: str = ""
    """What is replaced without touching a rank; empty for a fault that ends ranks."""
    machine: str = ""


BREAKS = (
    Break(Fault.KILL_RANK, ("--rank", "3")),
    Break(Fault.KILL_LAUNCHER, ("--machine", "m2"), "launcher", "m2"),
    Break(Fault.KILL_AGENT, ("--machine", "m1"), "agent", "m1"),
    Break(Fault.LOSE_MACHINE, ("--machine", "m3")),
    Break(Fault.KILL_CONTROLLER, (), "controller"),
)


class Broken(Exception):
    """Something is not as promised; the message says what."""


class Cost(NamedTuple):
    """What became of one fault."""

    fault: Fault
    back_s: float
    """From the command until training was proven to go on."""
    incident: int | None = None
    """Which of the job's incidents it was; None if no rank noticed."""


class Losses:
    """The file to which rank 0 appends the loss of every step that it finishes."""

    def __init__(self, path: Path) -> None:
        self.of: dict[int, str] = {}
        """Step -> its loss as a hexadecimal float: equal if all bits are."""
        self.again = 0
        """Steps that were done more than once."""
        self._path = path
        self._offset = 0

    def read(self) -> int:
        """Take in what is new; returns the number of different steps. Broken if bits differ."""
        if self._path.exists():
            with self._path.open() as file:
                file.seek(self._offset)
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self._offset += len(whole)
            for line in whole.splitlines():
                self._take(*line.split())
        return len(self.of)

    def _take(self, step: str, loss: str) -> None:
        self.again += int(step) in self.of
        before = self.of.setdefault(int(step), loss)
        if before != loss:
            raise Broken(f"step {step} was done again and its loss differs: {before}, then {loss}")

    @property
    def newest(self) -> float:
        """Loss of the newest step; there must be one."""
        return float.fromhex(self.of[max(self.of)])


class Show:
    """A bar that moves while the training works; lines above it. Plain lines without a terminal."""

    def __init__(self, steps: int) -> None:
        self.console = Console(highlight=False)
        self._steps = steps
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("step {task.completed} of {task.total}, loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._said_at = time.monotonic()

    @contextmanager
    def training(self, title: str) -> Iterator[None]:
        with self._bar:
            self._task = self._bar.add_task(title, total=self._steps, loss="not yet known")
            yield
            self._bar.remove_task(self._task)

    def losses(self, losses: Losses) -> None:
        assert self._task is not None, "called while training"
        done = losses.read()
        loss = f"{losses.newest:.4f}" if done else "not yet known"
        self._bar.update(self._task, completed=done, loss=loss)
        if not self.console.is_terminal and time.monotonic() > self._said_at + SAY_S:
            self._said_at = time.monotonic()
            self.say(f"  step {done} of {self._steps}, loss {loss}" if done else "  starting")

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, soft_wrap=True)


class Demo:
    """One disturbed and one undisturbed run in one directory, which is removed at the end."""

    def __init__(self, directory: Path, show: Show, steps: int) -> None:
        self._directory = directory
        self._steps = steps
        self._show = show
        self._job = JobPaths(directory / "state", "demo")  # type: ignore[arg-type]
        self._losses = Losses(directory / "losses")

    def run(self) -> None:
        """All of it. Broken or EverstepError if anything is not as promised."""
        show = self._show
        self._start()
        with show.training("everstep"):
            self._wait(lambda: self._losses.read() >= FURTHER_STEPS, "first steps")
            costs = [self._break(each) for each in BREAKS]
            show.say("all five are over; training goes on to its last step")
            self._wait(lambda: result_of(self._job) is not None, "end of the job")
            self._losses.read()
        incidents = self._check_end()
        self._check_nothing_left()
        undisturbed = self._undisturbed()
        self._compare(undisturbed)
        show.console.print(table(costs, incidents))
        show.say("\n" + tables.account(incidents.seconds, incidents.ettr))

    # --- the disturbed run ---

    def _start(self) -> None:
        flags = [
            *("--job", "demo", "--detach", "--disk-every", str(DISK_EVERY)),
            *("--local-machines", str(MACHINES), "--nproc-per-node", str(RANKS_EACH)),
            *("--standbys", "1", str(TRAIN), *self._script_flags("")),
        ]
        self._everstep("run", *flags)

    def _script_flags(self, suffix: str) -> list[str]:
        return [
            *("--steps", str(self._steps), "--batch", "8"),
            *("--loss-log", str(self._directory / f"losses{suffix}")),
            *("--digest", str(self._directory / f"digest{suffix}")),
        ]

    def _everstep(self, command: str, *words: str) -> None:
        """Run a command of everstep as a user would, and show it."""
        shown = [word for word in words if not word.startswith(str(self._directory))]
        self._show.say(f"$ everstep {' '.join([command, *shown])}")
        state = ("--state-dir", str(self._job.root.parent))
        argv = [sys.executable, "-m", "everstep", command, *state, *words]
        done = subprocess.run(
            argv, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        if done.returncode:
            raise Broken(f"everstep {command} failed: {done.stderr.decode(errors='replace')}")

    def _break(self, each: Break) -> Cost:
        """Inject one fault and wait until it is proven recovered."""
        before, again = self._status(), self._losses.again
        victim = read_pid_file(self._pid_file(each)) if each.service else None
        begun = time.monotonic()
        self._everstep("inject", str(each.fault), "demo", *each.target)
        if each.service:
            self._wait(lambda: self._replaced(each, victim), f"new {each.service}")
            reached = self._losses.read() + FURTHER_STEPS
            self._wait(lambda: self._losses.read() >= reached, "further steps")
        else:
            self._wait(lambda: self._recovered(before.incidents), f"recovery from {each.fault}")
        back_s, after = time.monotonic() - begun, self._status()
        if not each.service:
            self._show.say(f"  recovered; proven after {back_s:.1f} s")
            return Cost(each.fault, back_s, before.incidents)
        if (after.incidents, after.generation) != (before.incidents, before.generation):
            raise Broken(f"{each.fault} restarted ranks: it should cost no step")
        if self._losses.again != again:
            raise Broken(f"{each.fault} made rank 0 do a step again: it should cost none")
        self._show.say(f"  a new {each.service} after {back_s:.1f} s, and no step was lost")
        return Cost(each.fault, back_s)

    def _pid_file(self, each: Break) -> Path:
        if each.service == "controller":
            return self._job.controller_pid
        return self._job.machine(MachineId(each.machine)).pid_file(each.service)

    def _replaced(self, each: Break, victim: Process | None) -> bool:
        new = read_pid_file(self._pid_file(each))
        if new is None or new == victim:
            return False
        return each.service != "controller" or self._answers()

    def _answers(self) -> bool:
        try:
            self._status()
        except Away:
            return False
        return True

    def _recovered(self, before: int) -> bool:
        try:
            status = self._status()
        except Away:
            return False
        return status.incidents > before and status.incident is None

    def _status(self) -> StatusView:
        with Client(self._job) as client:
            return client.status()

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            self._show.losses(self._losses)
            result = result_of(self._job)
            if result is not None and not condition():
                raise Broken(
                    f"the job {result.outcome} while waiting for {what}: {result.why}; if it was "
                    "too fast for five faults, give more --steps"
                )
            if time.monotonic() > deadline:
                raise Broken(f"no {what} within {PATIENCE_S:.0f} s")
            time.sleep(POLL_S)

    def _check_end(self) -> IncidentsView:
        result = result_of(self._job)
        if result is None or result.outcome != "finished":
            raise Broken(f"the job did not finish: {result}")
        incidents = offline.incidents(self._job)
        expected = sum(1 for each in BREAKS if not each.service)
        if len(incidents.incidents) != expected:
            raise Broken(f"{len(incidents.incidents)} incidents were opened, not {expected}")
        lost = steps_lost(incidents.incidents[0])
        if lost > 1:
            raise Broken(f"the killed rank cost {lost} steps: at most the newest one may be lost")
        return incidents

    def _check_nothing_left(self) -> None:
        """The controller and its keeper go last: they give viewers a second to see the result."""
        spec = spec_of(self._job)
        shm = SHM_ROOT / shm_dir(spec.job, spec.uid, MachineId("")).name
        deadline = time.monotonic() + GONE_WITHIN_S
        while True:
            left = [path.name for path in SHM_ROOT.glob(f"{shm.name}*")]
            running = [path for path in self._job.root.rglob("*.pid") if read_pid_file(path)]
            if not left and not running:
                return
            if time.monotonic() < deadline:
                time.sleep(POLL_S)
                continue
            raise Broken(f"the job is over, and these are left: {left} {running}")

    # --- the undisturbed one ---

    def _undisturbed(self) -> Losses:
        losses = Losses(self._directory / "losses-undisturbed")
        ranks = MACHINES * RANKS_EACH
        self._show.say(f"$ torchrun --nproc-per-node {ranks} train.py   # the same, undisturbed")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), str(TRAIN), *self._script_flags("-undisturbed")),
        ]
        log = self._directory / "torchrun.log"
        with self._show.training("torchrun"), log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                while process.poll() is None and losses.read() < self._steps:
                    self._show.losses(losses)
                    time.sleep(POLL_S)
                process.wait()
            finally:
                end(process)
        if losses.read() < self._steps:
            raise Broken(f"torchrun failed: {log.read_text(errors='replace')[-2000:]}")
        return losses

    def _compare(self, undisturbed: Losses) -> None:
        ours, theirs = self._losses.of, undisturbed.of
        differ = sorted(step for step in range(self._steps) if ours.get(step) != theirs.get(step))
        if differ:
            raise Broken(f"{len(differ)} losses differ from the undisturbed run: {differ[:10]}...")
        digests = [
            (self._directory / f"digest{suffix}").read_text() for suffix in ("", "-undisturbed")
        ]
        if digests[0] != digests[1]:
            raise Broken(f"the trained parameters differ: {digests}")
        self._show.say(
            f"\nAll {self._steps} losses and the trained parameters are those of the undisturbed "
            f"run, bit for bit (steps done again: {self._losses.again}).\n"
        )

    def clean(self) -> None:
        """End whatever still runs."""
        if self._job.spec.exists():
            clean_job(self._job.root)


def steps_lost(incident: IncidentView) -> int:
    restored = -1 if incident.restored is None else incident.restored
    return max(0, incident.furthest - restored)


def table(costs: list[Cost], incidents: IncidentsView) -> Table:
    """Per fault the seconds spent, by what they were spent on, and the steps lost."""
    shown = Table(title="Seconds and steps that each fault cost", box=None, padding=(0, 1, 0, 0))
    shown.add_column("fault", no_wrap=True)
    for title in (*(title for _, title in tables.IN_TABLE), "total", "steps"):
        shown.add_column(title, justify="right", no_wrap=True)
    for cost in costs:
        if cost.incident is None:
            shown.add_row(cost.fault, *("-" for _ in tables.IN_TABLE), "-", "0")
            continue
        incident = incidents.incidents[cost.incident]
        seconds = [incident.seconds.get(owner, 0.0) for owner, _ in tables.IN_TABLE]
        cells = [f"{amount:.2f}" for amount in (*seconds, sum(seconds))]
        shown.add_row(cost.fault, *cells, str(steps_lost(incident)))
    return shown


def end(process: subprocess.Popen[bytes]) -> None:
    """End torchrun and its ranks, which have sessions of their own."""
    agent = identify(process.pid) if process.poll() is None else None
    if agent is None:
        return
    everyone = [agent, *descendants([agent])]
    for each in everyone:
        send_signal(each, signal.SIGKILL)
    process.wait()
    wait_gone(everyone, 10.0)


def environment() -> dict[str, str]:
    """On the CPU, also where there is a GPU: eight ranks would have to share it."""
    return os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def interrupted(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    raise KeyboardInterrupt


def main() -> int:
    signal.signal(signal.SIGTERM, interrupted)
    parser = argparse.ArgumentParser(description="Train on stand-in machines and break each part.")
    steps = STEPS_PER_CORE * min(os.cpu_count() or 1, MACHINES * RANKS_EACH)
    parser.add_argument("--steps", type=int, default=steps, help=f"here: {steps}")
    steps = parser.parse_args().steps
    show = Show(steps)
    directory = Path(tempfile.mkdtemp(prefix="everstep-demo-"))
    demo = Demo(directory, show, steps)
    begun = time.monotonic()
    try:
        demo.run()
    except (Broken, EverstepError) as problem:
        demo.clean()
        show.say(f"\nNOT as promised: {problem}\nThe job's records are kept in {directory}.")
        return 1
    except BaseException:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one Ctrl-C is enough: this takes a second
        demo.clean()
        shutil.rmtree(directory)
        raise
    shutil.rmtree(directory)
    show.say(f"\nAs promised, in {time.monotonic() - begun:.0f} s; nothing is left behind.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; nothing is left behind")
