"""Check host.readonly: a file system may not be written to any more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.host.source_mounts import MountsSample, Place
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result

_BY_KERNEL = frozenset({"emergency_ro", "shutdown"})
"""Nobody mounts with these: the kernel adds them after an error of the disk."""


class ReadOnly(Check[MountsSample, Limits]):
    """A kernel that finds a file system broken forbids to write to it: the disk is at fault.

    Compares with what the machine had when it came to the job: data is often mounted read-only.
    """

    name: ClassVar[str] = "host.readonly"
    source: ClassVar[str] = "mounts"
    about: ClassVar[str] = "a file system turned read-only (mount options)"

    def judge(self, here: Here, history: History[MountsSample]) -> Iterable[Result]:
        for item, places in history.now.sample.by_mount().items():
            now = places[0]
            before = history.first.sample.of(now.path)
            same = before is not None and before.file_system == now.file_system
            turned = before is not None and same and not before.read_only
            if not now.read_only:
                yield self.passed("it may be written to", item=item)
            elif turned or now.read_only in _BY_KERNEL:
                needed = [each.path for each in places if each.path in here.paths]
                yield self._turned(item, now, needed)
            else:
                yield self.passed("it has been read-only from the start", item=item)

    def _turned(self, item: str, now: Place, needed: list[str]) -> Result:
        who = f", and the job needs {needed[0]}" if needed else ""
        return self.found(
            Verdict.EVICT if needed else Verdict.SUSPECT,
            Category.FILESYSTEM_MOUNT if now.shared else Category.DISK_FAULT,
            f"{item} ({now.type} {now.device}) turned read-only: {now.read_only}{who}",
            "Look at the server, and mount it anew."
            if now.shared
            else "Look for I/O errors in the kernel log, check the disk (smartctl, nvme smart-log)"
            " and the file system (fsck) before it is used again.",
            item=item,
            cause=now.cause,
        )
