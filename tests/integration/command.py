"""Runs the real `everstep` command in its own state directory, and proves that nothing is left."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from everstep.cluster.cleanup import belongs, clean_job, job_scope
from everstep.commands import jobs
from everstep.commands.client import Away, Client
from everstep.controller.views import StatusView
from everstep.core.state import Phase
from everstep.files import FileUnreadable, read_json
from everstep.model import JobId
from everstep.paths import Endpoint, JobPaths
from everstep.processes import command_line, everyone

WITHIN_S = 110.0
"""Patience with anything: only a defect takes so long."""
RANKS = """
import os, pathlib, sys, time
rank = int(os.environ["RANK"])
here = pathlib.Path(__file__).parent
with open(here / f"started-{rank}", "a") as file:
    file.write(os.environ["TORCHELASTIC_RESTART_COUNT"] + chr(10))
def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.02)
"""
"""First lines of scripts that the tests run: `rank`, and `wait_for` a file beside the script."""


class Done(NamedTuple):
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


class Everstep:
    """The command, with a state directory below `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.state = directory / "state"
        self.environ = {**os.environ, "EVERSTEP_HOME": str(self.state), "COLUMNS": "120"}

    def __call__(self, *words: str | Path) -> Done:
        with self.popen(*words) as process:
            try:
                out, err = process.communicate(timeout=WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                _, err = process.communicate()
                raise AssertionError(f"everstep {words} does not end; it said: {err}") from None
        return Done(process.returncode, out, err)

    def popen(self, *words: str | Path, **more: Any) -> subprocess.Popen[str]:
        given: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            [sys.executable, "-m", "everstep", *map(str, words)],
            text=True,
            cwd=self.directory,
            env=self.environ,
            **(given | more),
        )

    def json(self, *words: str | Path) -> Any:
        done = self(*words, "--json")
        assert done.code == 0, done.err
        return json.loads(done.out)

    def script(self, body: str, name: str = "script.py") -> Path:
        path = self.directory / name
        path.write_text(RANKS + body)
        return path

    def job(self, name: str) -> JobPaths:
        return JobPaths(self.state, JobId(name))

    def starts(self, rank: int) -> int:
        """How often this rank of a script was started."""
        path = self.directory / f"started-{rank}"
        return len(path.read_text().splitlines()) if path.exists() else 0


@contextmanager
def everstep_in(directory: Path) -> Iterator[Everstep]:
    """The command; whatever a failing test leaves is ended afterwards."""
    command = Everstep(directory)
    try:
        yield command
    finally:
        for job in jobs.all_jobs(command.state):
            clean_job(job.root)


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Look again and again until it holds; an AssertionError names what never did."""
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.05)


def status_of(job: JobPaths) -> StatusView | None:
    """What the controller says; None while none answers. Far cheaper than a command's process."""
    try:
        with Client(job) as client:
            return client.status()
    except Away:
        return None


def runs(job: JobPaths, machines: int = 2) -> bool:
    """Whether all ranks run, and so many machines are there, with spare ones."""
    status = status_of(job)
    return status is not None and status.phase is Phase.RUNNING and len(status.machines) == machines


def processes_of(job: JobPaths) -> list[str]:
    """Command lines of every process of the job on this host."""
    scope = job_scope(job.root, jobs.spec_of(job))
    members = [process for process in everyone() if belongs(process, scope)]
    return [f"{process.pid} {' '.join(command_line(process.pid))}" for process in members]


def left_of(job: JobPaths) -> list[str]:
    """What is left of a job that ended: processes, shared memory, the port. Nothing, if it is well.

    Processes that were told to end get a moment: a viewer may be told of the end before them.
    """
    deadline = time.monotonic() + WITHIN_S / 4
    while (left := _left(job)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _left(job: JobPaths) -> list[str]:
    shm = [path for path in job_scope(job.root, jobs.spec_of(job)).shm if Path(path).exists()]
    return processes_of(job) + shm + ([f"{job.endpoint} answers"] if _answers(job) else [])


def _answers(job: JobPaths) -> bool:
    try:
        url = urlsplit(read_json(job.endpoint, Endpoint).url)
        with socket.create_connection((url.hostname, url.port), 1.0):
            return True
    except (FileUnreadable, OSError):
        return False
