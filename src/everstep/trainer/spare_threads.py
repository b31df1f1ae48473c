"""How many more threads may be started here, for recording.py.

A thread that torch cannot start ends the whole process, so whoever has it start some asks first.
Bounds are the control groups' (pids.max, of this one and those around it) and an ordinary user's
(RLIMIT_NPROC).
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def spare_threads(root: Path = ROOT) -> int | None:
    """None: there is no bound, or none that can be seen. `root` is where /proc and /sys lie."""
    return min((*_of_groups(root), *_of_user(root)), default=None)


def _of_groups(root: Path) -> Iterator[int]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in {"", "pids"}:
            continue
        top = root / "sys/fs/cgroup" / controllers
        inner = PurePosixPath(path.lstrip("/"))
        for group in (inner, *inner.parents):  # in a container the own one is the top
            most, used = (_text(top / group / name) for name in ("pids.max", "pids.current"))
            if most.isdecimal() and used.isdecimal():
                yield int(most) - int(used)


def _of_user(root: Path) -> Iterator[int]:
    """Root has no bound. All threads of all users count: more than those of this one, and quick."""
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    total = _text(root / "proc/loadavg").partition("/")[2].partition(" ")[0]
    if most != resource.RLIM_INFINITY and os.geteuid() != 0 and total.isdecimal():
        yield most - int(total)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
