"""Check host.storage: a directory does not answer, or only with errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.host.source_mounts import MountsSample, Place
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result
from everstep.model import Seconds

_BROKEN = frozenset(
    {"EIO", "ENXIO", "ENODEV", "ESHUTDOWN", "EUCLEAN", "ESTALE", "ENOTCONN", "ECONNABORTED"}
    | {"EHOSTDOWN", "EHOSTUNREACH", "EREMOTEIO", "ETIMEDOUT"}
)
"""A file system that answers so is broken, or its server is gone. Other errors (EACCES, ELOOP) are
about the path, or about who asks."""


class StorageLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of host.storage."""

    suspect_s: Seconds = 15.0
    """Without an answer for so long: suspect. NVRx waits so long for a path of its own; a fail-over
    of a storage server that takes longer stops training as well."""
    evict_s: Seconds = 75.0
    """Without an answer for so long, five times the former: evict. gpud, too, asks five times. If
    several machines lack the same network storage, they are one accuser: `Result.cause`."""


class Storage(Check[MountsSample, StorageLimits]):
    """Judges file systems, not directories: all on one hang together."""

    name: ClassVar[str] = "host.storage"
    source: ClassVar[str] = "mounts"
    about: ClassVar[str] = "storage hangs or fails (statvfs of what the job needs)"
    limits_type: ClassVar[type[Limits]] = StorageLimits
    keep: ClassVar[int] = 30

    def judge(self, here: Here, history: History[MountsSample]) -> Iterable[Result]:
        del here
        for item, places in history.now.sample.by_mount().items():
            # The one in the worst state speaks for all.
            worst = max(
                places, key=lambda each: (each.hangs_s, each.error in _BROKEN, not each.error)
            )
            if worst.hangs_s >= self.limits.suspect_s:
                yield self._hangs(item, worst)
            elif worst.error in _BROKEN:
                yield self._fails(item, worst, history)
            elif worst.error and worst.exists:
                yield self.could_not_run(f"{worst.path} cannot be looked at: {worst.error}", item)
            else:
                yield self._answers(item, worst)

    def _hangs(self, item: str, place: Place) -> Result:
        for_good = place.hangs_s >= self.limits.evict_s
        return self._bad(
            Verdict.EVICT if for_good else Verdict.SUSPECT,
            item,
            place,
            f"{place.path} has not answered for {place.hangs_s:.0f} s ({_what(place)})",
        )

    def _fails(self, item: str, place: Place, history: History[MountsSample]) -> Result:
        """At once a suspect: an error is an answer, and may be gone after a reconnect."""
        seen = [(each.at, each.sample.of(place.path)) for each in (*history.past, history.now)]
        since = history.now.at
        for at, before in reversed(seen):
            if before is None or before.error not in _BROKEN:
                break
            since = at
        for_s = history.now.at - since
        return self._bad(
            Verdict.EVICT if for_s >= self.limits.evict_s else Verdict.SUSPECT,
            item,
            place,
            f"{place.path} answers with {place.error}, for {for_s:.0f} s now ({_what(place)})",
        )

    def _bad(self, verdict: Verdict, item: str, place: Place, why: str) -> Result:
        return self.found(
            verdict,
            Category.FILESYSTEM_MOUNT if place.shared else Category.DISK_FAULT,
            why,
            "If only this machine has it, mount it anew or restart the machine; if several have,"
            " look at the server."
            if place.shared
            else "Look at the kernel log and at the disk (dmesg, smartctl, nvme smart-log).",
            item=item,
            cause=place.cause,
            values={"hangs_seconds": place.hangs_s},
        )

    def _answers(self, item: str, place: Place) -> Result:
        if place.hangs_s:
            return self.passed(
                f"no answer for {place.hangs_s:.1f} s yet", item=item, hangs_seconds=place.hangs_s
            )
        return self.passed(
            f"answered in {place.took_s * 1000:.1f} ms", item=item, took_seconds=place.took_s
        )


def _what(place: Place) -> str:
    return f"{place.type or 'unknown file system'} {place.device}".strip()
