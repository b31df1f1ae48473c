"""Check host.memory: the machine is running out of memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.host.reading import percent, share, size
from everstep.agent.checks.host.source_proc import ProcSample
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result


class MemoryLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of host.memory."""

    available: float = 0.05
    """Share of all memory: less than this is a warning. ml-engineering ends a run there, because
    what follows is the OOM killer, which picks whom it likes."""


class Memory(Check[ProcSample, MemoryLimits]):
    """Warns before the kernel ends processes: it says nothing about who is at fault."""

    name: ClassVar[str] = "host.memory"
    source: ClassVar[str] = "proc"
    about: ClassVar[str] = "memory of the machine is nearly used up (/proc/meminfo)"
    limits_type: ClassVar[type[Limits]] = MemoryLimits

    def judge(self, here: Here, history: History[ProcSample]) -> Iterable[Result]:
        del here
        sample = history.now.sample
        left = share(sample.available, sample.total)
        why = f"{size(sample.available)} of {size(sample.total)} are available ({percent(left)})"
        values = {"available_bytes": float(sample.available), "total_bytes": float(sample.total)}
        if left >= self.limits.available:
            yield self.passed(why, "", **values)
            return
        yield self.found(
            Verdict.WARN,
            Category.CPU_OOM,
            f"only {why}",
            "See what uses it (ps --sort=-rss, df /dev/shm): data loaders, caches, files in"
            " /dev/shm, or another job.",
            values=values,
        )
