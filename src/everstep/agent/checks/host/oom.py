"""Check host.oom: the kernel ended processes of the job for want of memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.host.reading import growth, share, size
from everstep.agent.checks.host.source_cgroup import CgroupSample, GroupMemory
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result


class OomLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of host.oom."""

    near: float = 0.9
    """Share of its limit that the group had used shortly before: then it is taken for the cause
    even if no counter says so, as with a limit around the group that a container does not see."""


class Oom(Check[CgroupSample, OomLimits]):
    """Tells by the group's limit whose fault it is: the job's, or that of what runs beside it."""

    name: ClassVar[str] = "host.oom"
    source: ClassVar[str] = "cgroup"
    about: ClassVar[str] = "processes of the job were ended for want of memory (cgroup)"
    limits_type: ClassVar[type[Limits]] = OomLimits

    def judge(self, here: Here, history: History[CgroupSample]) -> Iterable[Result]:
        del here
        now = history.now.sample.memory
        if now is None:
            return
        if now.oom_kills is None:
            yield self.could_not_run("the kernel does not count kills for want of memory")
            return
        memory = [each.sample.memory for each in (*history.past[-1:], history.now)]
        same = [each for each in memory if each is not None and each.group == now.group]
        kills = growth(each.oom_kills for each in same)
        if kills:
            yield self._killed(kills, now, same)
        else:
            yield self.passed("no process of the job was ended for want of memory")

    def _killed(self, kills: int, now: GroupMemory, same: list[GroupMemory]) -> Result:
        values = {"kills": float(kills)}
        what = f"the kernel ended {kills} processes of the job for want of memory"
        most = max(share(each.used, each.limit or 0) for each in same)
        if growth(each.limit_hits for each in same) or most >= self.limits.near:
            limit = size(now.limit) if now.limit is not None else "what it may have"
            return self.found(
                Verdict.USER,
                Category.CPU_OOM,
                f"{what}: it reached its limit of {limit}",
                "Ask for more memory (srun --mem, resources.limits.memory), or use less: fewer data"
                " loader workers, smaller caches.",
                values=values,
            )
        return self.found(
            Verdict.SUSPECT,
            Category.CPU_OOM,
            f"{what}, and not because of a limit of its own: the machine ran out of it",
            "See who used it (dmesg | grep -i oom lists all processes): what an earlier job left"
            " here, or a system process.",
            values=values,
        )
