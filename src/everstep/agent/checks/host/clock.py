"""Check host.clock: the clock is wrong, was set, or is read from a slow device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.host.source_clock import ClockSample
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result
from everstep.model import Seconds

_SLOW = frozenset({"hpet", "acpi_pm", "jiffies", "refined-jiffies"})
"""Reading the time costs a microsecond and more there, in every log line and every timer."""


class ClockLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of host.clock."""

    off_s: Seconds = 0.1
    """More is a warning: lines of several machines cannot be put in order any more."""
    wrong_s: Seconds = 1.0
    """More is suspect: time servers that work keep within milliseconds."""
    set_s: Seconds = 0.5
    """A change between two samples that is a warning: times in logs before it are off by that."""


class ClockRight(Check[ClockSample, ClockLimits]):
    """A machine whose time server is lost drifts by seconds a day."""

    name: ClassVar[str] = "host.clock"
    source: ClassVar[str] = "clock"
    about: ClassVar[str] = "clock not synchronised, off, set, or slow to read (adjtimex)"
    limits_type: ClassVar[type[Limits]] = ClockLimits

    def judge(self, here: Here, history: History[ClockSample]) -> Iterable[Result]:
        del here
        yield self._offset(history.now.sample)
        yield self._jump(history)
        yield self._clocksource(history.first.sample, history.now.sample)

    def _offset(self, now: ClockSample) -> Result:
        if now.offset_s is None:
            return self.could_not_run("this container may not ask the kernel (adjtimex)")
        why = f"off by about {now.offset_s * 1000:.1f} ms"
        values = {"offset_seconds": now.offset_s}
        if not now.synchronised:
            verdict, why = (
                Verdict.WARN,
                "nobody keeps it right (the kernel calls it unsynchronised)",
            )
        elif now.offset_s <= self.limits.off_s:
            return self.passed(why, "", **values)
        else:
            verdict = Verdict.SUSPECT if now.offset_s > self.limits.wrong_s else Verdict.WARN
        do = "Look at the time service (chronyc tracking, timedatectl): has it a server?"
        return self.found(verdict, Category.EXTERNAL_SERVICE_ERROR, why, do, values=values)

    def _jump(self, history: History[ClockSample]) -> Result:
        before = history.past[-1].sample if history.past else history.now.sample
        by_s = history.now.sample.ahead_s - before.ahead_s
        if abs(by_s) <= self.limits.set_s:
            return self.passed("nobody has set it", item="set", set_seconds=by_s)
        return self.found(
            Verdict.WARN,
            Category.EXTERNAL_SERVICE_ERROR,
            f"it was set by {by_s:+.1f} s",
            "Find out who did, or whether the machine was frozen (moved to another host). Times in"
            " logs before that are off.",
            item="set",
            values={"set_seconds": by_s},
        )

    def _clocksource(self, first: ClockSample, now: ClockSample) -> Result:
        item = "clocksource"
        if not now.clocksource:
            return self.could_not_run("it is not known what time is read from", item)
        fell_back = now.clocksource != first.clocksource and now.clocksource in _SLOW
        why = f"time is read from {now.clocksource}"
        if not fell_back:
            return self.passed(why, item=item)
        return self.found(
            Verdict.WARN,
            Category.MFU_DECLINE,
            f"{why} since the kernel gave up {first.clocksource or 'another device'}",
            "See why (dmesg | grep -i clocksource): a processor's clock that is unstable is a"
            " matter for support.",
            item=item,
        )
