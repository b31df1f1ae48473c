"""Check host.cgroup: the job comes near what it was given of this machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.host.reading import growth, percent, share, size
from everstep.agent.checks.host.source_cgroup import CgroupSample, GroupMemory, GroupTasks
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result


class CgroupLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of host.cgroup."""

    memory: float = 0.95
    """Share of the memory limit: more is a warning, as less than 5 % of a machine's would be."""
    tasks: float = 0.8
    """Share of the limit of processes and threads: more is a warning (gpud's number)."""
    throttled: float = 0.25
    """Share of the last minute's periods that it was stopped in: more is a warning. A data loader
    is stopped now and then on any machine that is shared."""
    periods: int = 100
    """Fewer in the last minute say nothing: ten seconds of work."""


class OwnCgroup(Check[CgroupSample, CgroupLimits]):
    """Warnings: limits are the user's, and machines of one job have the same."""

    name: ClassVar[str] = "host.cgroup"
    source: ClassVar[str] = "cgroup"
    about: ClassVar[str] = "the job comes near its limits of memory, time and tasks (cgroup)"
    limits_type: ClassVar[type[Limits]] = CgroupLimits
    keep: ClassVar[int] = 12

    def judge(self, here: Here, history: History[CgroupSample]) -> Iterable[Result]:
        del here
        now = history.now.sample
        if now.memory is not None and now.memory.limit:
            yield self._memory(now.memory, now.memory.limit)
        if now.tasks is not None and now.tasks.limit:
            yield self._tasks(now.tasks, now.tasks.limit)
        if now.cpu is not None:
            yield self._cpu(history)

    def _memory(self, memory: GroupMemory, limit: int) -> Result:
        part = share(memory.used, limit)
        why = f"{size(memory.used)} of {size(limit)} are used ({percent(part)})"
        values = {"used_bytes": float(memory.used), "limit_bytes": float(limit)}
        if part <= self.limits.memory:
            return self.passed(why, item="memory", **values)
        return self.found(
            Verdict.WARN,
            Category.CPU_OOM,
            f"{why}: the kernel ends a process of the job when it is all",
            "Ask for more memory (srun --mem, resources.limits.memory), or use less. Files in"
            " /dev/shm count.",
            item="memory",
            values=values,
        )

    def _tasks(self, tasks: GroupTasks, limit: int) -> Result:
        why = f"{tasks.used} of {limit} processes and threads"
        if share(tasks.used, limit) <= self.limits.tasks:
            return self.passed(why, item="tasks", used=tasks.used)
        return self.found(
            Verdict.WARN,
            Category.CPU_OVERLOAD,
            f"the job has {why}",
            "Raise pids.max (podPidsLimit, TasksMax), or use fewer data loader workers.",
            item="tasks",
            values={"used": float(tasks.used)},
        )

    def _cpu(self, history: History[CgroupSample]) -> Result:
        cpus = [each.sample.cpu for each in history.since(60.0)]
        periods = growth(each.periods for each in cpus if each)
        part = share(growth(each.throttled for each in cpus if each), periods)
        why = f"it was stopped in {percent(part)} of its last {periods} periods of 100 ms"
        if periods < self.limits.periods or part <= self.limits.throttled:
            return self.passed(why, item="cpu", throttled_ratio=part)
        return self.found(
            Verdict.WARN,
            Category.CPU_OVERLOAD,
            f"the job used up its share of the processors: {why}",
            "Ask for more processors (srun -c, resources.limits.cpu), or start fewer threads.",
            item="cpu",
            values={"throttled_ratio": part},
        )
