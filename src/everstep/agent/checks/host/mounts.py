"""Check host.mounts: what the job needs is not mounted any more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.host.source_mounts import AUTOMOUNTER, MountsSample, Place
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result


class MountsThere(Check[MountsSample, Limits]):
    """Compares with what the machine had when it came to the job.

    Without its mount, a directory still exists: the job would write to the local disk below it, and
    nobody would find its checkpoints again.
    """

    name: ClassVar[str] = "host.mounts"
    source: ClassVar[str] = "mounts"
    about: ClassVar[str] = "a directory of the job is gone, or what is mounted there changed"

    def judge(self, here: Here, history: History[MountsSample]) -> Iterable[Result]:
        for path in here.paths:
            now = history.now.sample.of(path)
            if now is not None:
                yield self._judge(now, history.first.sample.of(path))

    def _judge(self, now: Place, before: Place | None) -> Result:
        if not now.mount:
            return self.could_not_run("it is not known what it lies on", now.path)
        on = f"{now.type} {now.device} at {now.mount}"
        if before is not None and _differ(before, now):
            was = f"{before.type} {before.device} at {before.mount}"
            return self._gone(now.path, before, f"{now.path} was on {was}, and is on {on} now")
        if before is not None and before.exists and not before.hangs_s and not now.exists:
            return self._gone(now.path, before, f"{now.path} is gone from {on}")
        return self.passed(f"on {on}", item=now.path)

    def _gone(self, path: str, before: Place, why: str) -> Result:
        return self.found(
            Verdict.SUSPECT,
            Category.FILESYSTEM_MOUNT,
            why,
            "Mount it again, and find out who took it away (automounter, an administrator, a"
            " program of FUSE that ended).",
            item=path,
            cause=before.cause,
        )


def _differ(before: Place, now: Place) -> bool:
    """An automounter gives and takes mounts as they are used; the first one is none to go by."""
    told = before.mount and AUTOMOUNTER not in {before.type, now.type}
    return bool(told) and before.file_system != now.file_system
