"""Source "processes": who is stuck in the kernel, who is dead and not buried, which daemons run.

A look at every process takes some ten microseconds; once a minute that is nothing. Judged by
dstate.py, zombies.py, open_files.py and services.py.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from everstep.agent.checks.check import Here, NotReadable, Source
from everstep.agent.checks.host.reading import integer, missing, number, read, readable
from everstep.model import Seconds, Value

DAEMONS = {
    "chronyd": "chronyd",
    "containerd": "containerd",
    "dcgm-exporter": "dcgm-exporter",
    "dockerd": "dockerd",
    "kubelet": "kubelet",
    "munged": "munged",
    "ntpd": "ntpd",
    "nv-fabricmanage": "nv-fabricmanager",
    "nv-hostengine": "nv-hostengine",
    "nvidia-persiste": "nvidia-persistenced",
    "slurmd": "slurmd",
    "systemd-timesyn": "systemd-timesyncd",
}
"""What training machines run, by the 15 characters that the kernel keeps of a name."""


class Stuck(Value, frozen=True, kw_only=True):
    """One task that waits in the kernel and hears no signal (state D)."""

    pid: int
    start: int
    """With the pid a name for ever: clock ticks between the boot and its start."""
    name: str
    rank: int = 0
    """Pid of the rank that it belongs to, as a thread or as a child; 0: none."""
    where: str = ""
    """Function of the kernel that it waits in; empty: only root may know."""


class OpenFiles(Value, frozen=True, kw_only=True):
    """Of one rank."""

    pid: int
    used: int
    limit: int


class ProcessesSample(Value, frozen=True, kw_only=True):
    """Of one moment."""

    processes: int
    stuck: tuple[Stuck, ...] = ()
    zombies: int = 0
    pid_max: int | None = None
    daemons: tuple[str, ...] = ()
    """Those of DAEMONS that run."""
    open_files: tuple[OpenFiles, ...] = ()


class _Task(NamedTuple):
    state: str
    parent: int
    start: int
    name: str


class Processes(Source[ProcessesSample]):
    """Reads /proc/PID/stat of all processes, and of all threads of the ranks."""

    name: ClassVar[str] = "processes"
    kind: ClassVar[type[Value]] = ProcessesSample
    every_s: ClassVar[Seconds] = 60.0

    def absent(self, here: Here) -> str:
        return "there is no /proc" if missing(here, "/proc") else ""

    def sample(self, here: Here) -> ProcessesSample:
        tasks = dict(_tasks(here, "/proc"))
        if not tasks:
            raise NotReadable("no process is to be seen in /proc")
        ranks = set(here.pids)
        stuck = [
            _stuck(here, pid, task, task.parent if task.parent in ranks else 0)
            for pid, task in tasks.items()
            if task.state == "D" and pid not in ranks
        ]
        for rank in sorted(ranks & tasks.keys()):
            stuck += [
                _stuck(here, tid, task, rank)
                for tid, task in _tasks(here, f"/proc/{rank}/task")
                if task.state == "D"
            ]
        names = {task.name for task in tasks.values()}
        return ProcessesSample(
            processes=len(tasks),
            stuck=tuple(stuck),
            zombies=sum(task.state == "Z" for task in tasks.values()),
            pid_max=readable(lambda: number(here, "/proc/sys/kernel/pid_max")),
            daemons=tuple(DAEMONS[name] for name in sorted(names & DAEMONS.keys())),
            open_files=tuple(_open_files(here)),
        )


def _tasks(here: Here, directory: str) -> Iterator[tuple[int, _Task]]:
    """What is in this directory. One that ends meanwhile is left out, and so is garbage."""
    root = here.root.rstrip("/")
    try:
        names = os.listdir(root + directory)  # noqa: PTH208  # a Path for each takes longer
    except FileNotFoundError:
        return
    for name in names:
        if name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                yield int(name), _task(_stat(f"{root}{directory}/{name}/stat"))


def _stat(path: str) -> bytes:
    """One read, without a file object: there are thousands of them. A line has some 300 bytes."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)


def _task(stat: bytes) -> _Task:
    # The name may hold anything, also blanks and brackets: count from its end.
    before, _, rest = stat.rpartition(b")")
    words = rest.split(None, 20)
    return _Task(
        state=words[0].decode("ascii", "replace"),
        parent=integer(words[1]),
        start=integer(words[19]),
        name=before.partition(b"(")[2].decode("utf-8", "replace"),
    )


def _stuck(here: Here, pid: int, task: _Task, rank: int) -> Stuck:
    where = (readable(lambda: read(here, f"/proc/{pid}/wchan")) or "").strip("0\n ")
    return Stuck(pid=pid, start=task.start, name=task.name, rank=rank, where=where)


def _open_files(here: Here) -> Iterator[OpenFiles]:
    for pid in here.pids:
        with contextlib.suppress(OSError, ValueError):
            limit = resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]
            if limit > 0:  # RLIM_INFINITY is -1
                used = len(os.listdir(here.path(f"/proc/{pid}/fd")))  # noqa: PTH208
                yield OpenFiles(pid=pid, used=used, limit=limit)
