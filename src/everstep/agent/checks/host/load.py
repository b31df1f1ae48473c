"""Check host.load: more work for the processors than there are processors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.host.reading import growth, percent, share
from everstep.agent.checks.host.source_load import LoadSample
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result


class LoadLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of host.load."""

    per_cpu: float = 2.0
    """Tasks per processor, on average over five minutes: more is a warning. LBNL's node health
    check proposes twice the processors; what waits for a disk counts, too."""
    steal: float = 0.10
    """Share of the last five minutes that the hypervisor gave to others: more is a warning. A
    virtual machine for training has its processors for itself."""


class Overload(Check[LoadSample, LoadLimits]):
    """Never more than a warning: much work is slow, not broken."""

    name: ClassVar[str] = "host.load"
    source: ClassVar[str] = "load"
    about: ClassVar[str] = "processors are overloaded or stolen (/proc/loadavg, /proc/stat)"
    limits_type: ClassVar[type[Limits]] = LoadLimits
    keep: ClassVar[int] = 30

    def judge(self, here: Here, history: History[LoadSample]) -> Iterable[Result]:
        del here
        yield self._load(history.now.sample)
        yield self._steal(history)

    def _load(self, now: LoadSample) -> Result:
        why = f"{now.load:g} tasks run or wait on average, on {now.cpus} processors"
        values = {"load": now.load, "cpus": float(now.cpus)}
        if now.load <= self.limits.per_cpu * now.cpus:
            return self.passed(why, "", **values)
        return self.found(
            Verdict.WARN,
            Category.CPU_OVERLOAD,
            f"{why}: more than {self.limits.per_cpu:g} each",
            "See who they are (top): too many data loader workers or threads (OMP_NUM_THREADS),"
            " or somebody else's processes.",
            values=values,
        )

    def _steal(self, history: History[LoadSample]) -> Result:
        stamped = history.since(300.0)
        stolen = growth(each.sample.steal_ticks for each in stamped)
        part = share(stolen, growth(each.sample.ticks for each in stamped))
        why = f"the hypervisor gave {percent(part)} of the processors' time to others"
        if part <= self.limits.steal:
            return self.passed(why, item="steal", steal_ratio=part)
        return self.found(
            Verdict.WARN,
            Category.CPU_OVERLOAD,
            f"{why}, more than {percent(self.limits.steal)}",
            "Ask for dedicated processors, or for another host of this virtual machine.",
            item="steal",
            values={"steal_ratio": part},
        )
