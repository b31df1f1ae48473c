"""Check host.handles: the machine has nearly as many open files or tasks as it can have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.host.reading import share
from everstep.agent.checks.host.source_load import LoadSample
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result


class HandlesLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of host.handles."""

    used: float = 0.8
    """Share of what the kernel allows: more is a warning (gpud's number)."""


class Handles(Check[LoadSample, HandlesLimits]):
    """A warning, as it is usually a leak in the user's code that comes back elsewhere."""

    name: ClassVar[str] = "host.handles"
    source: ClassVar[str] = "load"
    about: ClassVar[str] = "open files and tasks against the kernel's limits (/proc/sys)"
    limits_type: ClassVar[type[Limits]] = HandlesLimits

    def judge(self, here: Here, history: History[LoadSample]) -> Iterable[Result]:
        del here
        now = history.now.sample
        yield self._judge("open files", now.files, now.files_max)
        yield self._judge("tasks", now.tasks, now.tasks_max)

    def _judge(self, item: str, used: int | None, most: int | None) -> Result:
        if used is None or not most:
            return self.could_not_run(f"the limit of {item} cannot be read", item)
        why = f"{used} of at most {most} {item}"
        if share(used, most) <= self.limits.used:
            return self.passed(why, item=item, used=used)
        return self.found(
            Verdict.WARN,
            Category.CPU_OVERLOAD,
            f"the machine has {why}",
            "See which process has so many (ls /proc/*/fd | wc, ps -eLf): usually one leaks.",
            item=item,
            values={"used": float(used)},
        )
