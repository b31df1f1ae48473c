"""What is mounted where, from /proc/self/mountinfo: read without touching any of it.

Used by the sources "mounts" (whose storage is it?), "cgroup" (where are the groups?) and "kernel"
(which disks and servers are the job's?).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_ESCAPE = re.compile(r"\\([0-7]{3})")
"""The kernel writes blanks and the like in octal."""
_SHARED = frozenset(
    {"9p", "afs", "autofs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre"}
    | {"ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "smb3", "smbfs", "virtiofs", "wekafs"}
)
_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.gvfsd-fuse"})
"""They serve what lies on this machine anyway. fuseblk does, too: it has a block device."""
_BROKEN = ("emergency_ro", "shutdown")
"""What ext4 adds to the options of a file system that it stopped after an error. Since Linux 6.15
it does not set "ro" then, and statvfs() does not tell."""


class Mount(NamedTuple):
    """One line of the table."""

    point: str
    root: str
    """Which directory of the file system is mounted there; of cgroups: which group."""
    number: str
    """Major and minor number of its device, "0:45"."""
    type: str
    source: str
    """Device, or for network file systems SERVER:/path."""
    options: frozenset[str]
    """Of this mount and of its file system."""

    @property
    def shared(self) -> bool:
        """Whether it comes from elsewhere: over the network, or from a FUSE server."""
        if self.type.startswith("fuse."):
            return self.type not in _LOCAL_FUSE
        return self.type == "fuse" or self.type in _SHARED

    @property
    def read_only(self) -> str:
        """The option that forbids to write; empty: none does."""
        return next((word for word in (*_BROKEN, "ro") if word in self.options), "")


def parse(text: str) -> list[Mount]:
    """In the order of mounting. Lines that are none are left out."""
    mounts = []
    for line in text.splitlines():
        before, dash, after = line.partition(" - ")
        words, rest = before.split(" "), after.split(" ")
        if not dash or len(words) < 6 or len(rest) < 3:
            continue
        mount = Mount(
            point=_plain(words[4]),
            root=_plain(words[3]),
            number=words[2],
            type=rest[0],
            source=_plain(rest[1]),
            options=frozenset((*words[5].split(","), *rest[2].split(","))),
        )
        mounts.append(mount)
    return mounts


def by_point(mounts: Iterable[Mount]) -> dict[str, Mount]:
    """What one sees at each point: the later mount hides the former."""
    return {mount.point: mount for mount in mounts}


def mount_of(path: str, mounts: dict[str, Mount]) -> Mount | None:
    """What this path lies on, by its name alone."""
    while path not in mounts:
        if path in {"", "/"}:
            return None
        path = path.rpartition("/")[0] or "/"
    return mounts[path]


def _plain(word: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), word) if "\\" in word else word
