"""What the tests of keeper, launcher and agent share: waiting, /proc, and a job of one machine."""

from __future__ import annotations

import shutil
import socket
import subprocess
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from everstep.agent.fork import GREETING, ForkReply, ForkRequest, frame, read
from everstep.cluster.keepers import command, machine_keeper
from everstep.files import read_json, write_atomically
from everstep.model import CheckpointSpec, Generation, JobId, JobSpec, MachineId
from everstep.paths import JobPaths, MachineSetup, shm_dir
from everstep.processes import identify, read_pid_file, snapshot

_Found = TypeVar("_Found")
DEADLINE_S = 90.0
"""Far above any honest wait: only a broken promise takes that long."""


def wait_for(what: str, look: Callable[[], _Found | None], within_s: float = DEADLINE_S) -> _Found:
    """The first true thing that `look` finds; fails the test if it never finds one."""
    deadline = time.monotonic() + within_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline, f"waited {within_s} s in vain for {what}"
        time.sleep(0.005)


def lines(path: Path) -> list[str]:
    """The whole lines of a file that may not exist yet."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def is_running(pid: int) -> bool:
    """Whether the process exists, and any thread of it has not ended."""
    return identify(pid) is not None


def exit_status(exits: Path, pid: int, start_ticks: int) -> int:
    """The status that the keeper recorded for this process, waiting for it: as of wait(2)."""

    def look() -> str | None:
        for line in lines(exits):
            if line.startswith(f"{pid} {start_ticks} "):
                return line.split()[2]
        return None

    return int(wait_for(f"the exit status of {pid}", look))


class Job:
    """A job of one machine under a real keeper, without controller."""

    def __init__(self, root: Path, shm: str) -> None:
        self.dir = root / "job"
        self.paths = JobPaths(root, JobId("job"))
        self.machine = self.paths.machine(MachineId("m0"))
        self.work = root / "work"
        self.shm = shm_dir(JobId("job"), shm, MachineId("m0"))
        self.uid = shm
        self.generation = 0
        self.keeper: subprocess.Popen[bytes] | None = None
        self.work.mkdir(parents=True)
        self.machine.root.mkdir(parents=True)

    def describe(self, command: Sequence[str], **fields: Any) -> JobSpec:
        """Write spec.json and machine.json."""
        checkpoint = CheckpointSpec(directory=str(self.dir / "checkpoints"))
        spec = JobSpec(
            job=JobId("job"),
            uid=self.uid,
            command=tuple(command),
            working_dir=str(self.work),
            **{"nnodes": 1, "nproc_per_node": 2, "checkpoint": checkpoint, **fields},
        )
        setup = MachineSetup(
            job=spec.job,
            uid=self.uid,
            machine=MachineId("m0"),
            address="127.0.0.1",
            host="testhost",
            job_dir=str(self.dir),
            nproc_per_node=spec.nproc_per_node,
            units=("switch:leaf7",),
        )
        write_atomically(self.dir / "spec.json", spec)
        write_atomically(self.machine.setup, setup)
        return spec

    def next_generation(self) -> Generation:
        self.generation += 1
        return Generation(self.generation)

    def start(self, *services: str, agent: str = "everstep.agent") -> None:
        """Start the machine's keeper with these of its services. `agent`: its module."""
        whole = machine_keeper(self.machine, read_json(self.machine.setup, MachineSetup))
        kept = {name: whole.services[name] for name in services}
        for service in kept.values():
            service.argv[:] = [agent if word == "everstep.agent" else word for word in service.argv]
        setup = msgspec.structs.replace(whole, services=kept)
        write_atomically(self.machine.root / "keeper.json", setup)
        with (self.machine.root / "keeper.log").open("ab") as log:
            self.keeper = subprocess.Popen(
                command(self.machine.root / "keeper.json"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def stop(self) -> None:
        """End the keeper and with it everything below it."""
        if self.keeper is not None:
            self.keeper.terminate()
            self.keeper.wait(DEADLINE_S)
        shutil.rmtree(self.shm, ignore_errors=True)

    def pid(self, service: str, other_than: int = 0) -> int:
        """Waits for the live process of this service."""

        def look() -> int | None:
            found = read_pid_file(self.machine.pid_file(service))
            return found.pid if found is not None and found.pid != other_than else None

        return wait_for(f"a {service} other than {other_than}", look)

    def parked(self, count: int = 2) -> set[int]:
        """Waits until the launcher has forked so many ranks ahead of time; their pids."""
        launcher, keeper = self.pid("launcher"), self.pid("keeper")

        def look() -> set[int] | None:
            found = {
                pid
                for pid, entry in snapshot().items()
                if (entry.parent, entry.session) == (keeper, launcher) and pid != launcher
            }
            return found if len(found) == count else None

        return wait_for(f"{count} parked ranks", look)

    def script(self, name: str, text: str) -> Path:
        path = self.work / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path


class Ran(NamedTuple):
    """How one rank ended, and what it wrote."""

    code: int
    """Exit code, negative for a signal, as subprocess has it."""
    output: str
    error: dict[str, Any] | None
    """Content of its error file."""


def ask_launcher(path: Path, request: ForkRequest) -> ForkReply:
    """Have the launcher behind this socket fork, as the agent does; waits until it is warm."""

    def connect() -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(path))
        except OSError:
            connection.close()
            return None
        return connection

    with wait_for("the launcher", connect) as connection, connection.makefile("rb") as stream:
        assert stream.read(len(GREETING)) == GREETING
        connection.sendall(frame(request))
        return read(stream, ForkReply)
