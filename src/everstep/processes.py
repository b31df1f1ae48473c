"""Names processes so that a reused pid is never mistaken for them: pid plus start time.

The local cluster, `everstep clean` and whoever else must end or watch a process it did not start
use this. Standard library and /proc only; it decides nothing about which process may be ended.
"""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
DEAD = frozenset("ZX")
"""The kernel's letters of threads that have ended."""


class Process(NamedTuple):
    """One process for ever: no second one has the same two numbers until the next boot."""

    pid: int
    start_ticks: int
    """Field 22 of /proc/PID/stat."""


class Entry(NamedTuple):
    """One process among its relatives, zombies too: nobody may have noticed its end."""

    process: Process
    parent: int
    session: int
    """Pid of the process that leads or led its session."""
    state: str
    """The kernel's letter of its main thread."""
    threads: int
    """That have not ended; a main thread that has, and was not waited for, counts as one."""
    name: str
    """At most 15 characters, as the program or the process itself set it."""
    ticks: int
    """Processor time of itself and of its dead children, in clock ticks."""

    @property
    def dead(self) -> bool:
        """All its threads have ended. The main thread may be a zombie while another one, which a
        driver holds, keeps memory, devices and children.
        """
        return self.state in DEAD and self.threads <= 1


def entry(pid: int) -> Entry | None:
    """None if there is no such process. OSError if that cannot be told: no descriptor is left."""
    try:
        raw = (_PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in field 2 may hold anything, also blanks and brackets: count from its end.
    begin, end = raw.index(b"("), raw.rindex(b")")
    fields = raw[end + 2 :].split()
    return Entry(
        process=Process(pid, int(fields[19])),
        parent=int(fields[1]),
        session=int(fields[3]),
        state=fields[0].decode(),
        threads=int(fields[17]),
        name=raw[begin + 1 : end].decode(errors="replace"),
        ticks=sum(map(int, fields[11:15])),
    )


def identify(pid: int) -> Process | None:
    """The process that has this pid now; None if there is none, or only a zombie of one."""
    found = entry(pid)
    return None if found is None or found.dead else found.process


def alive(process: Process) -> bool:
    """Whether exactly this process still runs. A zombie does not: it holds nothing but its pid."""
    return identify(process.pid) == process


def read_pid_file(path: Path) -> Process | None:
    """The process that a "PID START_TICKS" file names, if it still runs; None otherwise."""
    try:
        pid, ticks = path.read_text().split()
        named = Process(int(pid), int(ticks))
    except (OSError, ValueError):
        return None
    return named if alive(named) else None


def command_line(pid: int) -> list[str]:
    """Arguments of the process; empty if it is gone or its memory is not ours to read."""
    return _zero_separated(pid, "cmdline")


def environment(pid: int) -> list[str]:
    """NAME=VALUE strings the process was started with; empty if gone or not ours to read."""
    return _zero_separated(pid, "environ")


def maps_below(pid: int, directory: Path) -> bool:
    """Whether the process has a file below this directory mapped, deleted ones included."""
    try:
        return f"{directory}/" in (_PROC / str(pid) / "maps").read_text(errors="replace")
    except OSError:
        return False


def everyone() -> list[Process]:
    """Every live process of this host except the caller."""
    found = (identify(int(each.name)) for each in _PROC.iterdir() if each.name.isdigit())
    return [process for process in found if process and process.pid != os.getpid()]


def snapshot() -> dict[int, Entry]:
    """Every live process of this host by pid. Zombies are gone."""
    pids = [int(each.name) for each in os.scandir(_PROC) if each.name.isdigit()]
    found = {pid: there for pid in pids if (there := entry(pid)) is not None}
    return {pid: there for pid, there in found.items() if not there.dead}


def descendants(roots: list[Process]) -> list[Process]:
    """Live children of these processes, their children, and so on; without the roots."""
    parents = {process: _parent(process.pid) for process in everyone()}
    family = {root.pid for root in roots}
    found: list[Process] = []
    grown = True
    while grown:
        grown = False
        for process, parent in parents.items():
            if parent in family and process.pid not in family:
                family.add(process.pid)
                found.append(process)
                grown = True
    return found


def send_signal(process: Process, number: int) -> bool:
    """Signal exactly this process; False if it is gone. PermissionError if it is not ours."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        # Looked at after the handle was taken: from here on the pid cannot change hands.
        if not alive(process):
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def wait_gone(processes: list[Process], within_s: float) -> list[Process]:
    """Block until all of these have ended, at most `within_s`; returns those that still run."""
    deadline = time.monotonic() + within_s
    for process in processes:
        _wait_one(process, deadline)
    return [process for process in processes if alive(process)]


def _wait_one(process: Process, deadline: float) -> None:
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if alive(process):
            ended = select.poll()
            ended.register(handle, select.POLLIN)
            ended.poll(max(0.0, deadline - time.monotonic()) * 1000)
    finally:
        os.close(handle)


def _parent(pid: int) -> int:
    found = entry(pid)
    return 0 if found is None else found.parent


def _zero_separated(pid: int, name: str) -> list[str]:
    try:
        raw = (_PROC / str(pid) / name).read_bytes()
    except OSError:
        return []
    return [part.decode(errors="surrogateescape") for part in raw.split(b"\0") if part]
