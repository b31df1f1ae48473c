"""Where the groups of this process are: cgroup v1, v2, or both; in a container or not.

Used by the source "cgroup". The agent and its ranks are in one group: whoever starts a job on a
machine (Slurm, Kubernetes, a shell) puts its whole tree there.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from everstep.agent.checks.check import Here
from everstep.agent.checks.host.reading import missing, read
from everstep.agent.checks.mount_table import Mount, parse

_V1 = "cgroup"
_V2 = "cgroup2"


class Groups:
    """Remembers where they are, until the process is moved."""

    def __init__(self) -> None:
        self._membership = ""
        self._lines: dict[str, list[str]] = {}

    def look(self, here: Here) -> None:
        """Find out where they are. OSError if the kernel does not tell."""
        membership = read(here, "/proc/self/cgroup")
        if membership == self._membership:
            return
        mounts = parse(read(here, "/proc/self/mountinfo"))
        unified = _lines(here, "", membership, mounts)
        self._lines = {
            name: _lines(here, name, membership, mounts) or unified
            for name in ("memory", "cpu", "pids")
        }
        self._membership = membership

    def line(self, controller: str) -> list[str]:
        """Directories of its group and of all groups around it, as far as they are seen here."""
        return self._lines.get(controller, [])


def _lines(here: Here, controller: str, membership: str, mounts: Iterable[Mount]) -> list[str]:
    """Of a v1 controller; "": of the one tree of v2."""
    path = _member_of(controller, membership)
    mount = next((each for each in mounts if _carries(each, controller)), None)
    if path is None or mount is None:
        return []
    own = Path(mount.point + _below(path, mount.root))
    # In a container, the name may be that of the host, and what is mounted is the group itself.
    if missing(here, str(own)):
        own = Path(mount.point)
    around = [str(each) for each in own.parents if str(each).startswith(mount.point)]
    return [str(own), *around]


def _member_of(controller: str, membership: str) -> str | None:
    for line in membership.splitlines():
        words = line.split(":", 2)
        if len(words) == 3 and controller in words[1].split(","):
            return words[2]
    return None


def _carries(mount: Mount, controller: str) -> bool:
    if not controller:
        return mount.type == _V2
    return mount.type == _V1 and controller in mount.options


def _below(path: str, root: str) -> str:
    """The group's path as seen from what is mounted."""
    if root not in {"", "/"} and (path + "/").startswith(root + "/"):
        path = path[len(root) :]
    return "" if path == "/" or path.startswith("/..") else path
