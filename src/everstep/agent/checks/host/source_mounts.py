"""Source "mounts": what every directory that matters lies on, and whether that answers.

In a child process, and there in a thread for each directory: storage may keep whoever asks for
ever. That is an answer, too: the child itself never hangs. Judged by storage.py, mounts.py,
readonly.py and disk.py.
"""

from __future__ import annotations

import time
from typing import ClassVar

from msgspec.structs import replace

from everstep.agent.checks.check import Here, Source
from everstep.agent.checks.host.looks import Look, Seen
from everstep.agent.checks.host.reading import missing, read
from everstep.agent.checks.mount_table import Mount, by_point, mount_of, parse
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result
from everstep.model import Seconds, Value

ALWAYS = ("/", "/tmp", "/dev/shm")  # noqa: S108  # looked at, not written to
"""Directories that every program needs, with those that the job needs (`Here.paths`)."""
AUTOMOUNTER = "autofs"
"""Type of what holds a place until somebody comes, and then mounts something else there."""
_TABLE = "/proc/self/mountinfo"
_ANSWER_WITHIN_S: Seconds = 1.0
"""For all directories together: a healthy one needs a millisecond. The others are asked on."""
_SILENT_S: Seconds = 75.0
"""As long as a directory may hang before that evicts (StorageLimits.evict_s)."""


class Place(Value, frozen=True, kw_only=True):
    """One directory at one moment."""

    path: str
    mount: str = ""
    """Where its file system is mounted; empty: not known."""
    type: str = ""
    """"ext4", "nfs4", "fuse.s3fs"."""
    device: str = ""
    """What is mounted there: "/dev/nvme0n1p1", "server:/export"."""
    shared: bool = False
    """Whether it lies elsewhere, so that other machines see the same."""
    read_only: str = ""
    """The mount option that forbids to write; empty: none does."""
    hangs_s: Seconds = 0.0
    """For how long it has not answered; 0: it has."""
    took_s: Seconds = 0.0
    error: str = ""
    """What came instead of an answer: "EIO", "ESTALE"."""
    exists: bool = True
    """False: size and inodes are those of the nearest directory above it."""
    size: int = 0
    free: int = 0
    """Bytes left for ordinary users."""
    inodes: int = 0
    """0: this file system does not count them."""
    inodes_free: int = 0

    @property
    def cause(self) -> str:
        """What machines with the same trouble have in common: the server, whatever it exports."""
        server = self.device.rpartition(":/")[0] or self.device or self.mount
        return f"storage {server}" if self.shared else ""

    @property
    def file_system(self) -> tuple[str, str, str]:
        """Where, of which type, and what: the same ones are the same file system."""
        return self.mount, self.type, self.device


class MountsSample(Value, frozen=True, kw_only=True):
    """Of one moment."""

    places: tuple[Place, ...]

    def of(self, path: str) -> Place | None:
        """What was seen of this directory."""
        return next((each for each in self.places if each.path == path), None)

    def by_mount(self) -> dict[str, list[Place]]:
        """Directories that share a file system share its troubles."""
        found: dict[str, list[Place]] = {}
        for place in self.places:
            found.setdefault(place.mount or place.path, []).append(place)
        return found


class Mounts(Source[MountsSample]):
    """Reads the table of mounts, and asks every directory for its file system."""

    name: ClassVar[str] = "mounts"
    kind: ClassVar[type[Value]] = MountsSample
    every_s: ClassVar[Seconds] = 5.0
    blocks: ClassVar[bool] = True

    def __init__(self) -> None:
        self._looks: dict[str, Look] = {}
        """One for each directory: never a second one while the first one hangs."""
        self._real: dict[str, str] = {}
        """What a directory was the last time that it answered: links are resolved by asking."""
        self._text = ""
        self._mounts: dict[str, Mount] = {}

    def absent(self, here: Here) -> str:
        return f"there is no {_TABLE}" if missing(here, _TABLE) else ""

    def sample(self, here: Here) -> MountsSample:
        text = read(here, _TABLE)
        if text != self._text:
            self._text, self._mounts = text, by_point(parse(text))
        paths = tuple(dict.fromkeys((*ALWAYS, *here.paths)))
        for path in paths:
            if path not in self._looks or self._looks[path].seen is not None:
                self._looks[path] = Look(str(here.path(path)))
        until = time.monotonic() + _ANSWER_WITHIN_S
        for path in paths:
            self._looks[path].wait(until - time.monotonic())
        return MountsSample(places=tuple(self._place(here, path) for path in paths))

    def unanswered(self, for_s: Seconds, times: int) -> Result | None:
        """Its main thread touches no storage, except for its own program: that is read from one."""
        del times
        if for_s < _SILENT_S:
            return None
        return Result(
            check="host.storage",
            verdict=Verdict.SUSPECT,
            category=Category.DISK_FAULT,
            why=f"the process that looks at storage has not answered for {for_s:.0f} s",
            do="Look whether this machine's own disk hangs, or it has no time or memory left.",
        )

    def _place(self, here: Here, path: str) -> Place:
        look = self._looks[path]
        seen = look.seen
        if seen is not None:
            self._real[path] = _without(here.root, seen.real)
        mount = mount_of(self._real.get(path, path), self._mounts)
        place = Place(path=path, hangs_s=look.hangs_s, took_s=look.took_s)
        if mount is not None:
            place = replace(
                place,
                mount=mount.point,
                type=mount.type,
                device=mount.source,
                shared=mount.shared,
                read_only=mount.read_only,
            )
        return place if seen is None else _with(place, seen)


def _with(place: Place, seen: Seen) -> Place:
    return replace(
        place,
        error=seen.error,
        exists=seen.exists,
        size=seen.size,
        free=seen.free,
        inodes=seen.inodes,
        inodes_free=seen.inodes_free,
    )


def _without(root: str, path: str) -> str:
    """The path as the machine's own programs name it."""
    root = root.rstrip("/")
    return path[len(root) :] or "/" if root and path.startswith(root) else path
