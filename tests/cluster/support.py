"""Jobs whose machines run small scripts, and the certainty that nothing of them is left."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import msgspec

from everstep.cluster.cleanup import clean_job, job_scope
from everstep.cluster.keepers import KeeperSetup, Service, machine_keeper
from everstep.files import write_atomically
from everstep.model import CheckpointSpec, JobId, JobSpec, MachineId
from everstep.paths import JobPaths, MachinePaths, MachineSetup, shm_dir
from everstep.processes import Process, everyone, read_pid_file, send_signal, wait_gone
from everstep.trainer.context import VARIABLE

DEADLINE_S = 90.0
"""Far above any honest wait."""


def make_job(root: Path, *, nnodes: int = 2, standbys: int = 0) -> tuple[JobSpec, JobPaths]:
    """A job's directory with spec and token."""
    name = JobId(f"test-{uuid4().hex[:8]}")
    paths = JobPaths(root, name)
    spec = JobSpec(
        job=name,
        uid=uuid4().hex[:8],
        command=("train.py",),
        working_dir=str(root),
        nnodes=nnodes,
        nproc_per_node=2,
        standbys=standbys,
        local=True,
        checkpoint=CheckpointSpec(directory=str(root / "checkpoints")),
    )
    paths.root.mkdir(parents=True)
    write_atomically(paths.spec, spec)
    write_atomically(paths.token, b"secret")
    return spec, paths


@contextmanager
def job(root: Path, *, nnodes: int = 2, standbys: int = 0) -> Iterator[tuple[JobSpec, JobPaths]]:
    """The same; at the end everything of it is gone, whatever the test did."""
    spec, paths = make_job(root, nnodes=nnodes, standbys=standbys)
    try:
        yield spec, paths
    finally:
        clean_job(paths.root)
        assert not job_scope(paths.root, spec).shm


def sleeping(paths: MachinePaths, setup: MachineSetup) -> KeeperSetup:
    """A machine that runs, instead of agent and launcher, one script that owns shared memory."""
    shm = shm_dir(setup.job, setup.uid, setup.machine)
    script = (
        "import pathlib, subprocess, sys, time\n"
        f"shm = pathlib.Path({str(shm)!r})\n"
        "shm.mkdir(exist_ok=True)\n"
        "child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "(shm / 'child').write_text(str(child.pid))\n"
        "time.sleep(1000)\n"
    )
    real = machine_keeper(paths, setup)
    service = Service(
        argv=[sys.executable, "-S", "-c", script],
        env={VARIABLE: f'{{"shm":"{shm}"}}'},  # as a rank has it, and what a rank starts
        log=real.services["agent"].log,
        pid_file=real.services["agent"].pid_file,
    )
    return msgspec.structs.replace(real, services={"agent": service})


def wait_until(what: str, holds: Callable[[], object]) -> None:
    """Poll a condition; fail when it does not come true."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.005)


def kill(process: Process | None) -> None:
    """SIGKILL, and wait until it has taken effect."""
    assert process is not None
    send_signal(process, signal.SIGKILL)
    assert wait_gone([process], DEADLINE_S) == []


def keeper_of(paths: JobPaths, machine: MachineId) -> Process | None:
    return read_pid_file(paths.machine(machine).pid_file("keeper"))


def child_of(spec: JobSpec, machine: MachineId) -> Process | None:
    """The process that the machine's script started, if it runs."""
    file = shm_dir(spec.job, spec.uid, machine) / "child"
    if not file.exists() or not file.read_text():
        return None
    pid = int(file.read_text())
    return next((process for process in everyone() if process.pid == pid), None)


def runs(spec: JobSpec, paths: JobPaths, machine: MachineId) -> bool:
    """Whether the machine and its script's child are up."""
    return keeper_of(paths, machine) is not None and child_of(spec, machine) is not None
