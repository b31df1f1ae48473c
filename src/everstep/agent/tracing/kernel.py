"""What the kernel says of processes, read so that nothing can block: states, names, waits.

Files of /proc that need the memory of a process (cmdline, environ, maps) are not read here: where
it sleeps for ever with that locked, whoever reads them does, too. Used by families.py, tracer.py
and signalled.py.
"""

from __future__ import annotations

import os
from pathlib import Path

from everstep import processes
from everstep.processes import Entry

PROC = Path("/proc")
HELD = frozenset("TtDZX")
"""Letters of processes that do not answer: stopped, traced, in uninterruptible sleep, dead."""
STANDING = HELD - processes.DEAD
STOPPED = frozenset("Tt")
"""By a signal or a debugger: none of its threads runs."""


def entry(pid: int) -> Entry | None:
    """None if there is no such process, or it cannot be told: a look goes on with the others."""
    try:
        return processes.entry(pid)
    except OSError:
        return None


def entries() -> dict[int, Entry]:
    """Every process of this host by pid."""
    pids = [int(each.name) for each in os.scandir(PROC) if each.name.isdigit()]
    return {pid: found for pid in pids if (found := entry(pid)) is not None}


def waits_in(pid: int) -> str:
    """The function of the kernel that its main thread waits in; empty: none, or not to be seen."""
    try:
        name = (PROC / str(pid) / "wchan").read_text().strip()
    except OSError:
        name = ""
    return name if name not in {"", "0"} else _innermost(pid)


def _innermost(pid: int) -> str:
    """Of the kernel's stack, which only root may read."""
    try:
        line = (PROC / str(pid) / "stack").read_text().partition("\n")[0]
    except OSError:
        return ""
    return line.rpartition("] ")[2].partition("+")[0] if "+" in line else ""


def takes(pid: int, number: int) -> bool:
    """Whether it has a handler for this signal and lets it through now.

    What has no handler dies of it, and one that is held back may arrive when there is none any
    more: a child that is about to become another program holds all signals back.
    """
    caught, blocked = (_of_status(pid, field, 16) for field in ("SigCgt:", "SigBlk:"))
    return bool((caught & ~blocked) >> (number - 1) & 1)


def traced(pid: int) -> bool:
    """Whether a debugger or the like has hold of it."""
    return _of_status(pid, "TracerPid:", 10) != 0


def _of_status(pid: int, field: str, base: int) -> int:
    try:
        text = (PROC / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return 0
    found = (line.split()[1] for line in text.splitlines() if line.startswith(field))
    return int(next(found, "0"), base)


def has_open(pid: int, path: Path) -> bool:
    """Whether one of its descriptors is this very file."""
    try:
        wanted = path.stat()
        links = list(os.scandir(PROC / str(pid) / "fd"))
    except OSError:
        return False
    for link in links:
        try:
            # The name first: to look at a file of a network that is gone would block.
            if Path(link.path).readlink().name == path.name:
                return os.path.samestat(link.stat(), wanted)
        except OSError:
            continue
    return False
