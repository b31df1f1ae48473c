"""Check host.zombies: dead processes that nobody buries fill the table of processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.host.source_processes import ProcessesSample
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result


class ZombiesLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of host.zombies."""

    count: int = 1000
    """More is a warning (gpud's number)."""
    share: float = 0.2
    """Of all pids that the machine has: more is a warning, too, where there are few."""


class Zombies(Check[ProcessesSample, ZombiesLimits]):
    """A warning: it is a bug of their parent, and stops new processes only in the end."""

    name: ClassVar[str] = "host.zombies"
    source: ClassVar[str] = "processes"
    about: ClassVar[str] = "dead processes that nobody waits for (state Z of /proc/PID/stat)"
    limits_type: ClassVar[type[Limits]] = ZombiesLimits

    def judge(self, here: Here, history: History[ProcessesSample]) -> Iterable[Result]:
        del here
        now = history.now.sample
        most = self.limits.count
        if now.pid_max:
            most = min(most, int(self.limits.share * now.pid_max))
        why = f"{now.zombies} of {now.processes} processes are dead and not waited for"
        if now.zombies <= most:
            yield self.passed(why, zombies=now.zombies)
            return
        yield self.found(
            Verdict.WARN,
            Category.CPU_OVERLOAD,
            f"{why}, more than {most}",
            "Find their parent (ps -eo ppid,stat | grep Z | sort | uniq -c), and restart it; in a"
            " container, start it with an init (docker --init).",
            values={"zombies": float(now.zombies)},
        )
