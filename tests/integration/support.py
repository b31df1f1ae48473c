"""Whole jobs on this host: real controller, keepers, agents, launchers; ranks without torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import httpx2
import msgspec

from everstep.cluster.cleanup import Cleaned, clean_job, job_scope
from everstep.cluster.keepers import SETUP_NAME, controller_keeper, start_keeper
from everstep.controller.views import IncidentsView, MachineView, StatusView
from everstep.core.state import Phase
from everstep.files import FileUnreadable, read_json, write_atomically
from everstep.model import (
    CheckpointSpec,
    ChecksSpec,
    Every,
    JobId,
    JobSpec,
    MachineId,
    PolicySpec,
)
from everstep.paths import Endpoint, JobPaths, JobResult
from everstep.processes import Process, alive, command_line, everyone, read_pid_file

DEADLINE_S = 90.0
"""Far above any honest wait."""
STEPS = """
import pathlib, sys, time
import everstep

run = everstep.attach()
finish = pathlib.Path("finish")
for step in run.steps(start=0):
    time.sleep(0.01)
    run.report(loss=1 / (step + 1))
    if step == 0:
        print("first step", flush=True)
    if finish.exists():
        break
"""
"""Steps until somebody puts a file `finish` beside it; starts anew in every generation."""
_Found = TypeVar("_Found")


def wait_for(what: str, look: Callable[[], _Found | None]) -> _Found:
    """The first true thing that `look` finds; fails the test if it never finds one."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := look()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)
    return found


class Job:
    """A job as its user sees it."""

    def __init__(self, spec: JobSpec, paths: JobPaths) -> None:
        self.spec = spec
        self.paths = paths
        self.cleaned = Cleaned()
        """What was left at the end of the test."""

    def start(self) -> None:
        """What `everstep run` does: the keeper of the controller's host, detached."""
        keeper = self.paths.root / SETUP_NAME
        write_atomically(keeper, controller_keeper(self.paths, []))
        assert start_keeper(keeper, self.paths.keeper_log) is not None
        self.wait(lambda status: status.phase is Phase.RUNNING, "the first generation")

    def status(self) -> StatusView | None:
        """None while no controller answers."""
        content = self._ask("GET", "/v1/status")
        return msgspec.json.decode(content, type=StatusView) if content else None

    def incidents(self) -> IncidentsView:
        content = wait_for("incidents", lambda: self._ask("GET", "/v1/incidents"))
        return msgspec.json.decode(content, type=IncidentsView)

    def wait(self, holds: Callable[[StatusView], object], what: str) -> StatusView:
        """The first status for which it holds."""

        def look() -> StatusView | None:
            status = self.status()
            return status if status is not None and holds(status) else None

        return wait_for(f"{what}; {self.logs()}", look)

    def order(self, path: str, **body: Any) -> None:
        assert self._ask("POST", path, body) is not None, path

    def result(self) -> JobResult:
        """How it ended, once it has."""

        def look() -> JobResult | None:
            try:
                return read_json(self.paths.result, JobResult)
            except FileUnreadable:
                return None

        return wait_for("the result", look)

    def service(self, machine: str, name: str) -> Process | None:
        return read_pid_file(self.paths.machine(MachineId(machine)).pid_file(name))

    def controller(self) -> Process | None:
        return read_pid_file(self.paths.controller_pid)

    def machine(self, machine: str) -> MachineView:
        status = wait_for("a status", self.status)
        return next(view for view in status.machines if view.machine == machine)

    def logs(self) -> str:
        """Where to look when a wait was in vain."""
        return f"logs in {self.paths.root}"

    def nothing_is_left(self) -> bool:
        root = str(self.paths.root)
        return not job_scope(self.paths.root, self.spec).shm and not any(
            root in " ".join(command_line(process.pid)) for process in everyone() if alive(process)
        )

    def _ask(self, method: str, path: str, body: object = None) -> bytes | None:
        try:
            url = read_json(self.paths.endpoint, Endpoint).url
            response = httpx2.request(
                method,
                url + path,
                headers={"Authorization": "Bearer secret"},
                content=msgspec.json.encode(body),
                trust_env=False,
                timeout=10.0,
            )
        except (FileUnreadable, httpx2.TransportError):
            return None
        assert response.status_code == 200, response.text
        return response.content


@contextmanager
def job(
    root: Path,
    script: str = STEPS,
    *,
    nnodes: int = 2,
    standbys: int = 0,
    policy: PolicySpec | None = None,
    checks: ChecksSpec | None = None,
) -> Iterator[Job]:
    """A job of stand-ins with one rank each; whatever the test did, nothing of it is left."""
    (root / "train.py").write_text(script)
    name = JobId(f"test-{uuid4().hex[:8]}")
    spec = JobSpec(
        job=name,
        uid=uuid4().hex[:8],
        command=(sys.executable, "train.py"),
        no_python=True,
        working_dir=str(root),
        nnodes=nnodes,
        nproc_per_node=1,
        standbys=standbys,
        local=True,
        checkpoint=CheckpointSpec(directory=str(root / "checkpoints"), disk_every=Every()),
        policy=policy or PolicySpec(),
        checks=checks or ChecksSpec(),
    )
    paths = JobPaths(root / "jobs", name)
    paths.root.mkdir(mode=0o700, parents=True)
    write_atomically(paths.spec, spec)
    write_atomically(paths.token, b"secret")
    made = Job(spec, paths)
    try:
        yield made
    finally:
        made.cleaned = clean_job(paths.root)
        assert not job_scope(paths.root, spec).shm
