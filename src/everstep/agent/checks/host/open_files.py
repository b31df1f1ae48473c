"""Check host.open_files: a rank has nearly as many open files as it may have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.host.reading import share
from everstep.agent.checks.host.source_processes import ProcessesSample
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result


class OpenFilesLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of host.open_files."""

    used: float = 0.8
    """Share of the process's limit: more is a warning (gpud's number)."""


class RanksOpenFiles(Check[ProcessesSample, OpenFilesLimits]):
    """A warning before "Too many open files": as a rule, a leak in the user's code."""

    name: ClassVar[str] = "host.open_files"
    source: ClassVar[str] = "processes"
    about: ClassVar[str] = "open files of the ranks against their limit (/proc/PID/fd)"
    limits_type: ClassVar[type[Limits]] = OpenFilesLimits

    def judge(self, here: Here, history: History[ProcessesSample]) -> Iterable[Result]:
        del here
        for files in history.now.sample.open_files:
            item = f"pid {files.pid}"
            why = f"{files.used} of at most {files.limit} open files"
            if share(files.used, files.limit) <= self.limits.used:
                yield self.passed(why, item=item, used=files.used)
                continue
            yield self.found(
                Verdict.WARN,
                Category.CPU_OVERLOAD,
                f"rank process {files.pid} has {why}",
                f"See which (ls -l /proc/{files.pid}/fd); raise the limit with ulimit -n, or share"
                " tensors by torch.multiprocessing.set_sharing_strategy('file_system').",
                item=item,
                values={"used": float(files.used)},
            )
