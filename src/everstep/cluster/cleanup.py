"""Ends every process of a job, or of one machine of it, and removes what would outlive them.

The logic of `everstep clean`, and what the local cluster does with a stand-in that is lost or
evicted. It blocks for up to a few seconds, so an event loop calls it in a thread. It is
idempotent, and it touches only what it can prove to belong to the job: keepers by their pid files,
their descendants, processes of ours that were started for a directory of the job, and processes
that use the job's shared memory. A person's `tail -f` of a log is none of these.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from everstep.cluster.keepers import MODULE as KEEPER
from everstep.files import read_json
from everstep.model import EverstepError, JobId, JobSpec, MachineId, Value
from everstep.paths import SHM_ROOT, JobPaths, MachinePaths, shm_dir
from everstep.processes import (
    Process,
    alive,
    command_line,
    descendants,
    environment,
    everyone,
    maps_below,
    send_signal,
    wait_gone,
)
from everstep.trainer.context import VARIABLE

SWEEP_S = 5.0
"""Time for keepers to end their machines by themselves: they find what nobody else can."""
KILL_S = 10.0
"""Time for the kernel to end what was killed. Only a process in the kernel takes longer."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""torchrun's variable; every rank has it, with a path in its machine's directory."""
_SERVICES = (KEEPER, "everstep.agent", "everstep.controller")


class ProcessesRemain(EverstepError):
    """Something of the job would not die."""


class Cleaned(Value, frozen=True, kw_only=True):
    """What was ended and removed, for people."""

    processes: tuple[str, ...] = ()
    """ "PID command line" of each."""
    directories: tuple[str, ...] = ()
    """Of shared memory and of copies on this host's disk, also those that a keeper removed itself
    on its way out."""
    files: tuple[str, ...] = ()
    """Sockets and pid files."""

    def __str__(self) -> str:
        if not self.processes and not self.directories and not self.files:
            return "nothing was left"
        parts = (
            _counted(self.processes, "process ended", "processes ended"),
            _counted(self.directories, "directory of copies", "directories of copies"),
            _counted(self.files, "socket or pid file", "sockets and pid files"),
        )
        return ", ".join(part for part in parts if part) + " removed"


class Scope(Value, frozen=True, kw_only=True):
    """What belongs together: a job, or one machine of it."""

    directory: str
    """Of the job or of the machine; processes of ours that name a path in it belong to it."""
    shm: tuple[str, ...]
    """Directories of shared memory; processes that use one belong to it."""
    local_disk: tuple[str, ...] = ()
    """Directories of the machines' copies on this host's disk: worth nothing without the job."""


def job_scope(root: Path, spec: JobSpec) -> Scope:
    """Everything of the job on this host."""
    found = SHM_ROOT.glob(f"{shm_dir(spec.job, spec.uid, MachineId('')).name}*")
    return Scope(
        directory=str(root.absolute()),
        shm=tuple(sorted(map(str, found))),
        local_disk=_copies_of(spec, "*"),
    )


def machine_scope(paths: MachinePaths, spec: JobSpec, machine: MachineId) -> Scope:
    """Everything of one stand-in machine."""
    shm = shm_dir(spec.job, spec.uid, machine)
    local_disk = _copies_of(spec, f"-{machine}")
    return Scope(directory=str(paths.root.absolute()), shm=(str(shm),), local_disk=local_disk)


def _copies_of(spec: JobSpec, ending: str) -> tuple[str, ...]:
    directory = spec.checkpoint.local_directory
    found = Path(directory).glob(f"everstep-{spec.job}-{spec.uid}{ending}") if directory else ()
    return tuple(sorted(map(str, found)))


def clean_job(root: Path) -> Cleaned:
    """End and remove everything of the job whose directory this is; its records and logs stay.

    FileUnreadable if it is no job's directory, ProcessesRemain if something would not die.
    """
    root = root.absolute()
    spec = read_json(root / "spec.json", JobSpec)
    paths = JobPaths(root.parent, JobId(root.name))  # renamed if a later job took its name
    scope = job_scope(root, spec)
    processes = end_processes(scope)
    late = job_scope(root, spec)  # again: a machine may have come up meanwhile
    files = [paths.endpoint, paths.controller_pid, paths.keeper_pid]
    for directory in _subdirectories(paths.machines):
        files += _files_of(MachinePaths(directory))
    return Cleaned(
        processes=tuple(processes),
        directories=tuple(sorted({*scope.shm, *scope.local_disk, *_remove_directories(late)})),
        files=tuple(str(path) for path in files if _removed(path)),
    )


def clean_machine(paths: MachinePaths, spec: JobSpec, machine: MachineId) -> Cleaned:
    """End and remove everything of one stand-in machine; its logs stay."""
    scope = machine_scope(paths, spec, machine)
    processes = end_processes(scope)
    return Cleaned(
        processes=tuple(processes),
        directories=tuple(_remove_directories(scope)),
        files=tuple(str(path) for path in _files_of(paths) if _removed(path)),
    )


def end_processes(scope: Scope) -> list[str]:
    """End every process of the scope; returns what they were.

    Keepers get time to sweep their machines, because they alone find a descendant that changed
    its name, its session and its environment. What is left then is killed, until nothing is.
    """
    found = _family(scope)
    described = {process: _describe(process) for process in found}
    keepers = [process for process in found if KEEPER in command_line(process.pid)]
    for keeper in keepers:
        send_signal(keeper, signal.SIGTERM)
    wait_gone(keepers, SWEEP_S)
    deadline = time.monotonic() + KILL_S
    while left := [process for process in found if alive(process)] or _family(scope):
        described |= {process: _describe(process) for process in left if process not in described}
        for process in left:
            send_signal(process, signal.SIGKILL)
        if remaining := wait_gone(left, deadline - time.monotonic()):
            raise _remain(remaining, scope)
    return [described[process] for process in sorted(described)]


def _remain(processes: list[Process], scope: Scope) -> ProcessesRemain:
    pids = ", ".join(str(process.pid) for process in processes)
    return ProcessesRemain(
        f"these processes of {scope.directory} did not end within {KILL_S:.0f} s of SIGKILL:"
        f" {pids}. They are inside the kernel (a driver, a hung file system); run"
        " `everstep clean` again when it lets go of them"
    )


def belongs(process: Process, scope: Scope) -> bool:
    """Whether the process was started for this scope or uses its shared memory."""
    return (
        _serves(command_line(process.pid), Path(scope.directory))
        or _attached(environment(process.pid), scope)
        or any(maps_below(process.pid, Path(shm)) for shm in scope.shm)
    )


def _family(scope: Scope) -> list[Process]:
    members = [process for process in everyone() if belongs(process, scope)]
    return members + [process for process in descendants(members) if process not in members]


def _serves(argv: list[str], directory: Path) -> bool:
    """Whether this is a command line of one of our services with a path in the directory."""
    if "-m" not in argv:
        return False
    module, *arguments = argv[argv.index("-m") + 1 :] or [""]
    ours = any(module == name or module.startswith(f"{name}.") for name in _SERVICES)
    return ours and any(Path(argument).is_relative_to(directory) for argument in arguments)


def _attached(environ: list[str], scope: Scope) -> bool:
    """Whether this is the environment of a rank, or of what a rank started.

    attach() takes its own variable out; that of torch's error file stays with all of them.
    """
    variables = dict(assignment.partition("=")[::2] for assignment in environ)
    context, error_file = variables.get(VARIABLE, ""), variables.get(ERROR_FILE, "")
    return error_file.startswith(f"{scope.directory}/") or any(
        f'"{directory}"' in context for directory in scope.shm
    )


def _describe(process: Process) -> str:
    return f"{process.pid} {' '.join(command_line(process.pid))}".rstrip()


def _subdirectories(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(entry for entry in directory.iterdir() if entry.is_dir())


def _files_of(paths: MachinePaths) -> Iterator[Path]:
    yield paths.launcher_socket
    yield paths.notice_socket
    for service in ("keeper", "agent", "launcher"):
        yield paths.pid_file(service)


def _remove_directories(scope: Scope) -> Iterator[str]:
    for directory in (*scope.shm, *scope.local_disk):
        try:
            shutil.rmtree(directory)
        except FileNotFoundError:
            continue
        yield directory


def _removed(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _counted(items: tuple[str, ...], one: str, many: str) -> str:
    return f"{len(items)} {one if len(items) == 1 else many}" if items else ""
