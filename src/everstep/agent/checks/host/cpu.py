"""Check host.cpu: processors are slowed down by heat, switched off, or set to save power."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import ClassVar

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.host.reading import growth
from everstep.agent.checks.host.source_cpu import CpuSample
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Counts, Result
from everstep.model import Seconds


class CpuLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of host.cpu."""

    rounds: int = 5
    """Minutes in a row with throttling: fewer are a burst of work that every processor has."""
    governor: str = ""
    """What must decide about clocks, "performance" for example. Empty: any, because "powersave" is
    what most distributions set and Intel's own driver makes quick enough."""


class CpuSpeed(Check[CpuSample, CpuLimits]):
    """Slow processors are slow training, no failure: it counts together with a slow-down."""

    name: ClassVar[str] = "host.cpu"
    source: ClassVar[str] = "cpu"
    about: ClassVar[str] = "processors throttled by heat, switched off, or saving power (sysfs)"
    limits_type: ClassVar[type[Limits]] = CpuLimits
    keep: ClassVar[int] = 30
    clear_after_s: ClassVar[Seconds] = 120.0

    def judge(self, here: Here, history: History[CpuSample]) -> Iterable[Result]:
        del here
        yield from self._heat(history)
        yield self._online(history.first.sample, history.now.sample)
        yield from self._governor(history.now.sample)

    def _heat(self, history: History[CpuSample]) -> Iterable[Result]:
        if history.now.sample.throttles is None:
            return
        counts = [each.sample.throttles for each in (*history.past, history.now)]
        counts = counts[-self.limits.rounds - 1 :]
        steps = [growth(pair) for pair in itertools.pairwise(counts)]
        values = {"throttles": float(sum(steps))}
        if len(steps) < self.limits.rounds or not all(steps):
            why = f"slowed down by heat {sum(steps)} times in the last {len(steps)} samples"
            yield self.passed(why, item="heat", **values)
            return
        yield self.found(
            Verdict.WARN,
            Category.MFU_DECLINE,
            f"heat slowed processors down {sum(steps)} times, in each of {len(steps)} samples",
            "Look at fans, air and the power supply (ipmitool sensor).",
            item="heat",
            counts=Counts.WITH_SLOWDOWN,
            values=values,
        )

    def _online(self, first: CpuSample, now: CpuSample) -> Result:
        if now.online >= first.online:
            return self.passed(f"{now.online} are on", item="online", online=now.online)
        return self.found(
            Verdict.WARN,
            Category.MFU_DECLINE,
            f"only {now.online} processors are on, {first.online} were",
            "Find out who switched them off (dmesg), and switch them on:"
            " echo 1 > /sys/devices/system/cpu/cpuN/online.",
            item="online",
            values={"online": float(now.online)},
        )

    def _governor(self, now: CpuSample) -> Iterable[Result]:
        if not now.governors:
            return
        why = f"clocks follow {', '.join(now.governors)}"
        if self.limits.governor in {"", *now.governors} and len(now.governors) == 1:
            yield self.passed(why, item="governor")
        elif not self.limits.governor:
            yield self.passed(f"{why}: not all alike", item="governor")
        else:
            yield self.found(
                Verdict.WARN,
                Category.MFU_DECLINE,
                f"{why}, and {self.limits.governor} is wanted",
                f"Set it: cpupower frequency-set -g {self.limits.governor}.",
                item="governor",
            )
