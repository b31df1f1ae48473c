"""Jobs under measurement: the same script under torchrun and under everstep.

Used by bench/restart.py and bench/checkpoint.py. A job can be started, watched through the marks
that its ranks write, paused as a whole (so that several are alive and only one of them computes)
and ended. Everything that a job starts is ended with it, also when the benchmark fails.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Self

from everstep.journal.records import Reader, Record
from everstep.journal.snapshots import RECORDS
from everstep.processes import (
    Process,
    descendants,
    identify,
    read_pid_file,
    send_signal,
    wait_gone,
)

HERE = Path(__file__).resolve().parent
MODULES = HERE.parent / "examples" / "gpt"
PATIENCE_S = 120.0
"""Longest wait for anything: torchrun's restart takes up to 30 s on a busy machine."""
POLL_S = 0.005


class Program(NamedTuple):
    """What a job runs: a script of bench/ that writes marks (marks.py), on so many ranks."""

    script: str
    words: tuple[str, ...]
    ranks: int
    max_restarts: int = 100


class Mark(NamedTuple):
    """One line of a rank's file."""

    rank: int
    restart: int
    pid: int
    event: str
    step: int
    at_ns: int


class Stuck(Exception):
    """A job did not do what was waited for; the message holds the end of its output."""


class Job:
    """One running job. Use as a context manager: leaving it ends everything of the job."""

    name = ""

    def __init__(self, directory: Path, program: Program) -> None:
        self.directory = directory
        self.ranks = program.ranks
        self._max_restarts = program.max_restarts
        self.output = directory / "output"
        self._marks = directory / "marks"
        self._marks.mkdir(parents=True)
        self._read: dict[int, tuple[int, list[Mark]]] = {}
        self._script = [str(HERE / program.script), "--marks", str(self._marks), *program.words]

    def __enter__(self) -> Self:
        with self.output.open("wb") as output:
            self._start(output)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def _start(self, output: IO[bytes]) -> None:
        raise NotImplementedError

    def over(self) -> bool:
        """Whether it has ended by itself."""
        return False

    def processes(self) -> list[Process]:
        """Every process of the job, ranks included."""
        raise NotImplementedError

    def end(self) -> None:
        raise NotImplementedError

    # --- what its ranks wrote ---

    def marks(self) -> Iterator[Mark]:
        """All marks so far, rank by rank, each rank's in order of time."""
        for rank in range(self.ranks):
            yield from self._marks_of(rank)

    def _marks_of(self, rank: int) -> list[Mark]:
        offset, marks = self._read.get(rank, (0, []))
        try:
            with (self._marks / f"rank-{rank}").open("rb") as file:
                file.seek(offset)
                new = file.read()
        except FileNotFoundError:
            return marks
        whole = new[: new.rfind(b"\n") + 1]
        for line in whole.decode().splitlines():
            restart, pid, event, step, at_ns = line.split()
            marks.append(Mark(rank, int(restart), int(pid), event, int(step), int(at_ns)))
        self._read[rank] = (offset + len(whole), marks)
        return marks

    def restarts(self) -> int:
        """Restarts so far, by what rank 0 was told at its start."""
        marks = self._marks_of(0)
        return marks[-1].restart if marks else 0

    def reached(self, event: str, restart: int) -> list[Mark] | None:
        """Each rank's first mark of this event in this incarnation; None if one has none yet."""
        found = []
        for rank in range(self.ranks):
            mark = next(
                (m for m in self._marks_of(rank) if (m.event, m.restart) == (event, restart)), None
            )
            if mark is None:
                return None
            found.append(mark)
        return found

    def restarted(self, event: str, before: int) -> list[Mark] | None:
        """The same of the first incarnation after `before` in which every rank got that far."""
        for restart in range(before + 1, self.restarts() + 1):
            if (marks := self.reached(event, restart)) is not None:
                return marks
        return None

    def last_step(self, rank: int, restart: int) -> int:
        """Newest step that the rank finished in this incarnation, -1 for none."""
        steps = (m.step for m in self._marks_of(rank) if m.restart == restart)
        return max(steps, default=-1)

    def steps(self, restart: int) -> int:
        """Steps that every rank finished in this incarnation."""
        return min(
            sum(1 for m in self._marks_of(rank) if (m.event, m.restart) == ("step", restart))
            for rank in range(self.ranks)
        )

    def ends_since(self, begun_ns: int) -> list[int]:
        """When rank 0 finished its steps since then, in nanoseconds."""
        marks = self._marks_of(0)
        return [m.at_ns for m in marks if m.event == "step" and m.at_ns > begun_ns]

    def wait_steps(self, restart: int, count: int) -> None:
        self.wait(lambda: self.steps(restart) >= count, f"{count} steps after {restart} restarts")

    def wait(
        self, condition: Callable[[], object], what: str, within_s: float = PATIENCE_S
    ) -> None:
        """Poll until the condition is true; Stuck when it takes longer, or the job is over."""
        deadline = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline or self.over():
                tail = self.output.read_text(errors="replace")[-2000:]
                raise Stuck(f"{self.name}: no {what} within {within_s:.0f} s\n{tail}")
            time.sleep(POLL_S)

    # --- what is done to it ---

    def kill_rank(self, rank: int) -> int:
        """SIGKILL; returns when, in nanoseconds of the monotonic clock."""
        pid = self._marks_of(rank)[-1].pid
        at_ns = time.monotonic_ns()
        os.kill(pid, signal.SIGKILL)
        return at_ns

    def pause(self) -> None:
        """Stop every process, parents first, so that nobody sees another one missing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes():
            send_signal(process, number)


class Torchrun(Job):
    """torchrun at its best: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or most restarts fail."""

    name = "torchrun"

    def __init__(self, directory: Path, program: Program, packages: Sequence[Path] = ()) -> None:
        """`packages`: directories that its processes may import from, too."""
        super().__init__(directory, program)
        self._packages = packages

    def _start(self, output: IO[bytes]) -> None:
        self._agent = subprocess.Popen(
            self._command(),
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def _command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(self.ranks), "--max-restarts", str(self._max_restarts)),
            *self._script,
        ]

    def _environment(self) -> dict[str, str]:
        env = environment()
        path = os.pathsep.join((env["PYTHONPATH"], *map(str, self._packages)))
        return env | {"PYTHONPATH": path, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def over(self) -> bool:
        return self._agent.poll() is not None

    def processes(self) -> list[Process]:
        agent = identify(self._agent.pid)
        return [] if agent is None else [agent, *descendants([agent])]

    def end(self) -> None:
        self._agent.send_signal(signal.SIGSTOP)  # so that it starts no more ranks
        processes = self.processes()
        for process in processes:
            send_signal(process, signal.SIGKILL)
        self._agent.wait()
        wait_gone(processes, 10.0)


class Nvrx(Torchrun):
    """NVIDIA's ft_launcher; it keeps its timeouts and the same script."""

    name = "nvrx"

    def _command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher"),
            *("--nnodes", "1", "--nproc-per-node", str(self.ranks), "--max-restarts", "100"),
            *("--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0"),
            *("--ignore-missing-fault-tol-cfg", *self._script),
        ]


class Dlrover(Torchrun):
    """dlrover-run with a local master, which is started here: its own way to start one calls torch
    as it was before 2.13.
    """

    name = "dlrover"

    def _start(self, output: IO[bytes]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._master = subprocess.Popen(
            [
                *(sys.executable, "-u", "-m", "dlrover.python.master.main"),
                *("--platform", "local", "--job_name", "bench", "--node_num", "1"),
                *("--port", str(self._port)),
            ],
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        super()._start(output)

    def _command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "dlrover.trainer.torch.main", "--nnodes", "1"),
            *("--nproc-per-node", str(self.ranks), "--max-restarts", str(self._max_restarts)),
            *self._script,
        ]

    def _environment(self) -> dict[str, str]:
        master = f"127.0.0.1:{self._port}"
        return super()._environment() | {"DLROVER_MASTER_ADDR": master, "NODE_RANK": "0"}

    def processes(self) -> list[Process]:
        master = identify(self._master.pid)
        return [*super().processes(), *([] if master is None else [master])]

    def end(self) -> None:
        super().end()
        self._master.wait()


class Everstep(Job):
    """everstep with two stand-in machines and half of the ranks on each. No disk tier."""

    name = "everstep"
    machines = 2

    def __init__(self, directory: Path, program: Program, flags: Sequence[str] = ()) -> None:
        """`flags`: more flags of `everstep run`."""
        super().__init__(directory, program)
        self._flags = flags
        self.job_directory = directory / "state" / "bench"

    def _start(self, output: IO[bytes]) -> None:
        per_machine = self.ranks // self.machines
        self._everstep(
            output,
            *("run", "--job", "bench", "--detach", "--local-machines", str(self.machines)),
            *("--nproc-per-node", str(per_machine), "--disk-every", "0", *self._flags),
            *self._script,
        )

    def journal(self) -> list[Record]:
        """What the controller has written down so far."""
        return [entry.record for entry in Reader(self.job_directory / "journal" / RECORDS)]

    def processes(self) -> list[Process]:
        pid_files = sorted(self.job_directory.rglob("keeper.pid"))
        keepers = [keeper for path in pid_files if (keeper := read_pid_file(path)) is not None]
        return [*keepers, *descendants(keepers)]

    def end(self) -> None:
        with (self.directory / "end").open("wb") as output:
            self._everstep(output, "clean", "bench")

    def _everstep(self, output: IO[bytes], command: str, *words: str) -> None:
        state = ("--state-dir", str(self.directory / "state"))
        subprocess.run(
            [sys.executable, "-m", "everstep", command, *state, *words],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=True,
        )


def environment() -> dict[str, str]:
    """The same for both: one thread per rank, the modules of the example on the path."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(MODULES), os.environ.get("PYTHONPATH", "")))
        ),
    }


def fresh(directory: Path) -> Path:
    """An empty directory of this name."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory
