"""Check host.disk: space or inodes of a file system are nearly used up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, NamedTuple

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.host.reading import percent, share, size
from everstep.agent.checks.host.source_mounts import MountsSample, Place
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result

SHM = "/dev/shm"  # noqa: S108  # looked at, not written to


class DiskLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of host.disk."""

    low: float = 0.05
    """Share of space that is left: less is a warning. imbue's host checks use 95 %."""
    full_bytes: int = 500 << 20
    """Bytes that are left: less is full, as gpud has it..."""
    full: float = 0.01
    """...if it is less than this share, too: a small tmpfs has never more."""
    inodes: float = 0.1
    """Share of inodes that is left: less is a warning (90 % used is everybody's number)."""
    inodes_full: float = 0.01
    """Share of inodes that is left: less is full."""


class _State(NamedTuple):
    low: bool
    full: bool
    why: str


class Disk(Check[MountsSample, DiskLimits]):
    """Full is what the job needs: then its next checkpoint fails. Low is a warning to people."""

    name: ClassVar[str] = "host.disk"
    source: ClassVar[str] = "mounts"
    about: ClassVar[str] = "space or inodes of /, /tmp, /dev/shm or the job's directories run out"
    limits_type: ClassVar[type[Limits]] = DiskLimits

    def judge(self, here: Here, history: History[MountsSample]) -> Iterable[Result]:
        for item, places in history.now.sample.by_mount().items():
            known = [each for each in places if each.size and not each.error and not each.read_only]
            if not known:
                continue  # Of what does not answer, or is an image that is full by nature.
            needed = next((each.path for each in known if _matters(each.path, here)), "")
            yield self._judge(item, known[0], needed)

    def _judge(self, item: str, place: Place, needed: str) -> Result:
        values = {"free_bytes": float(place.free), "size_bytes": float(place.size)}
        if place.inodes:
            values["free_inodes"] = float(place.inodes_free)
        states = [self._space(place), self._inodes(place)]
        worst = max(states, key=lambda each: (each.full, each.low))
        if not worst.low and not worst.full:
            return self.passed(states[0].why, item=item, **values)
        in_memory = item == SHM
        return self.found(
            self._verdict(place, full=worst.full and bool(needed)),
            Category.CONTAINER_ERROR if in_memory else Category.INSUFFICIENT_DISK_SPACE,
            f"only {worst.why} on {item}" + (f", where {needed} is" if needed else ""),
            "Remove what dead processes left there (ls -la /dev/shm), or raise its size"
            " (docker --shm-size, an emptyDir of medium Memory)."
            if in_memory
            else "Make room: old checkpoints, logs, core files, caches (du -xhd1).",
            item=item,
            cause=place.cause,
            values=values,
        )

    def _verdict(self, place: Place, *, full: bool) -> Verdict:
        if not full:
            return Verdict.WARN
        return Verdict.JOB if place.shared else Verdict.SUSPECT

    def _space(self, place: Place) -> _State:
        left = share(place.free, place.size)
        return _State(
            low=left < self.limits.low,
            full=left < self.limits.full and place.free < self.limits.full_bytes,
            why=f"{size(place.free)} of {size(place.size)} ({percent(left)}) are left",
        )

    def _inodes(self, place: Place) -> _State:
        left = share(place.inodes_free, place.inodes)
        return _State(
            low=bool(place.inodes) and left < self.limits.inodes,
            full=bool(place.inodes) and left < self.limits.inodes_full,
            why=f"{place.inodes_free} of {place.inodes} inodes ({percent(left)}) are left",
        )


def _matters(path: str, here: Here) -> bool:
    """Checkpoints of everstep and batches of data loaders lie in shared memory."""
    return path in here.paths or path == SHM
