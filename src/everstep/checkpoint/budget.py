"""How much shared memory there is for slots: free space of the file system and memory cgroup.

slots.py asks before it reserves anything, because the kernel does not say no kindly: a full tmpfs
kills the writer with SIGBUS unless the pages were reserved, and a full memory cgroup kills it
whatever was reserved. Reads only; no torch.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from everstep.checkpoint.need import in_words
from everstep.model import Value

UNLIMITED = 1 << 60
"""cgroup v1 says "no limit" as a number near 2**63."""
CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC_CGROUP = Path("/proc/self/cgroup")


class Room(Value, frozen=True, kw_only=True):
    """What may still be reserved, and who says so."""

    free_bytes: int
    where: str
    """For people: the file system, or the cgroup, that has the least room."""

    def __str__(self) -> str:
        return f"{self.where} has {in_words(self.free_bytes)} left"


def room_in(directory: Path) -> Room:
    """The tighter of the file system's free space and the memory cgroup's headroom."""
    stat = os.statvfs(directory)
    disk = Room(free_bytes=stat.f_bavail * stat.f_frsize, where=f"the file system of {directory}")
    headroom = cgroup_headroom(PROC_CGROUP, CGROUP_ROOT)
    if headroom is None or headroom >= disk.free_bytes:
        return disk
    return Room(free_bytes=headroom, where="this process's memory cgroup")


def locked_limit() -> int | None:
    """Bytes that this process may lock in memory (RLIMIT_MEMLOCK); None: any amount."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def cgroup_headroom(proc: Path, root: Path) -> int | None:
    """Bytes below the tightest memory limit of this process's cgroup and its parents.

    Page cache of ordinary files counts as free, since the kernel drops it first. None: no limit,
    or none that can be read.
    """
    found = [
        headroom
        for directory in _memory_cgroups(proc, root)
        if (headroom := _headroom(directory)) is not None
    ]
    return min(found) if found else None


def _memory_cgroups(proc: Path, root: Path) -> list[Path]:
    """Directories of version 1's memory controller and of version 2, from the leaf upwards."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return []
    places: list[Path] = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            tops = [root, root / "unified"]
        elif "memory" in controllers.split(","):
            tops = [root / "memory"]
        else:
            continue
        for top in tops:
            # In a container the path may be the host's while the mount shows only our own part.
            leaf = top / path.lstrip("/")
            places += [
                leaf,
                *(parent for parent in leaf.parents if top in (parent, *parent.parents)),
            ]
    return places


def _headroom(directory: Path) -> int | None:
    limit = _number(directory, "memory.max", "memory.limit_in_bytes")
    used = _number(directory, "memory.current", "memory.usage_in_bytes")
    if limit is None or used is None or limit >= UNLIMITED:
        return None
    return max(0, limit - used + _file_cache(directory))


def _number(directory: Path, *names: str) -> int | None:
    for name in names:
        try:
            text = (directory / name).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None


def _file_cache(directory: Path) -> int:
    try:
        lines = (directory / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stat = dict(line.split(" ", 1) for line in lines if " " in line)
    prefix = "total_" if "total_inactive_file" in stat else ""
    return sum(int(stat.get(f"{prefix}{name}_file", 0)) for name in ("inactive", "active"))
