"""Turns results into alerts: says once what is wrong, again when that matters, and when it is over.

Pure: no clock, no file. The runner brings samples with their time; what comes back is said to the
controller. Everything here outlives the agent (memory.py), so that a restart neither hides an
alert nor says it twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from everstep.agent.checks.check import AnyCheck, Here, History, Limits, Stamped
from everstep.agent.checks.judging import ITEMS_MAX, SEVERITY, fit, judge, not_read
from everstep.diagnosis.words import Verdict
from everstep.events import AlertCleared, AlertRaised
from everstep.health import Alert, Result
from everstep.model import MachineId, Seconds, Value

Said = AlertRaised | AlertCleared


ERROR_S: Seconds = 600.0
"""A check that could not run for so long is told once: nobody watches that signal here. A driver
that is being reloaded, or a busy file system, is over by then."""
CLEARED_S: Seconds = 600.0
"""So long the end of an alert is remembered, to be told again by the next agent: what a killed
agent said last may not have arrived."""


class Standing(msgspec.Struct, kw_only=True):
    """An item that did not simply pass."""

    source: str
    check: str
    item: str
    told: Result | None = None
    """What the controller was told of it."""
    told_at: Seconds = 0.0
    error_since: Seconds | None = None
    """Since when it could not be looked at, if that is so."""
    passing_since: Seconds | None = None
    """Since when it passes, after a fail."""


class Cleared(Value, frozen=True, kw_only=True):
    """An alert that is over."""

    check: str
    item: str
    at: Seconds


class Remembered(msgspec.Struct, kw_only=True):
    """What the monitor knows, for the next agent of this machine."""

    histories: dict[str, History[Any]] = {}
    """Of every source."""
    standings: list[Standing] = []
    cleared: list[Cleared] = []


class Monitor:
    """All checks of one machine."""

    def __init__(
        self, machine: MachineId, checks: Iterable[AnyCheck], remembered: Remembered
    ) -> None:
        self.could_not_run: Counter[str] = Counter()
        self.defects: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        """Results beyond the bound of items, by check."""
        self.latest: dict[str, tuple[Result, ...]] = {}
        """Newest results of every check."""
        self._machine = machine
        self._by_source: dict[str, list[AnyCheck]] = {}
        self._by_name: dict[str, AnyCheck] = {}
        for check in checks:
            self._by_source.setdefault(check.source, []).append(check)
            self._by_name[check.name] = check
        self._histories = dict(remembered.histories)
        self._cleared = list(remembered.cleared)
        self._standings: dict[str, dict[str, Standing]] = {}
        for each in remembered.standings:
            self._standings.setdefault(each.check, {})[each.item] = each

    @property
    def sources(self) -> list[str]:
        """Names of those that some check needs."""
        return list(self._by_source)

    def remembered(self) -> Remembered:
        return Remembered(
            histories=self._histories, standings=list(self._all()), cleared=self._cleared
        )

    def alerts(self) -> list[Standing]:
        """What the controller was told and has not been told the end of."""
        return [each for each in self._all() if each.told is not None]

    # --- what is new ---

    def told_again(self, now: Seconds) -> list[Said]:
        """What a new agent says first: all that holds, with its age, and what is over.

        The controller ignores what it knows. What nobody judges any more is over.
        """
        said: list[Said] = []
        for each in list(self._all()):
            gone = each.check not in self._by_name
            if gone and each.told is not None:
                self._clear(each, now)
            elif gone:
                self._forget(each)
            elif each.told is not None:
                said.append(self._raised(each.told, now - each.told_at))
        self._cleared = [each for each in self._cleared if now - each.at < CLEARED_S]
        over = dict.fromkeys((each.check, each.item) for each in self._cleared)
        holds = {(each.check, each.item) for each in self.alerts()}
        return said + [self._over(*key) for key in over if key not in holds]

    def sampled(self, source: str, here: Here, sample: Stamped[Any]) -> list[Said]:
        """A new sample of this source."""
        history = self._extended(source, sample)
        self._histories[source] = history
        said: list[Said] = []
        seen: set[tuple[str, str]] = set()
        unsure: set[str] = set()
        for check in self._by_source.get(source, ()):
            judgement = judge(check, here, history)
            self.defects[check.name] += judgement.defect
            self.dropped[check.name] += judgement.dropped
            self.latest[check.name] = judgement.results
            for result in judgement.results:
                seen.add(result.key)
                if result.verdict is Verdict.ERROR and not result.item:
                    unsure.add(check.name)
                said += self._taken(source, result, sample.at)
        for each in list(self._all()):
            vanished = each.source == source and (each.check, each.item) not in seen
            if vanished and each.check not in unsure and each.check in self._by_name:
                said += self._passed(each, sample.at)
        return said

    def not_sampled(self, source: str, why: str, at: Seconds) -> list[Said]:
        """The source could not be read: none of its checks could run."""
        said: list[Said] = []
        for result in not_read(self._by_source.get(source, ()), why):
            fitted = fit(result, Limits())
            self.latest[result.check] = (fitted,)
            said += self._taken(source, fitted, at)
        return said

    def unanswered(self, source: str, result: Result | None, why: str, at: Seconds) -> list[Said]:
        """The source's child does not answer; `result`: what the source says that this means.

        It speaks in the name of a check, which a site may have turned off or weakened.
        """
        said = self.not_sampled(source, why, at)
        check = None if result is None else self._by_name.get(result.check)
        if result is not None and check is not None:
            fitted = fit(result, check.limits)
            self.latest[result.check] = (fitted,)
            said += self._taken(source, fitted, at)
        return said

    def has_sampled(self, source: str) -> bool:
        """Whether this source was there once, since the machine booted."""
        return source in self._histories

    # --- one item ---

    def _taken(self, source: str, result: Result, at: Seconds) -> list[Said]:
        if result.verdict is Verdict.ERROR:
            self.could_not_run[result.check] += 1
        standing = self._standings.get(result.check, {}).get(result.item)
        if standing is None:
            if result.verdict is Verdict.INFO:
                return []
            items = self._standings.setdefault(result.check, {})
            if len(items) >= ITEMS_MAX:
                self.dropped[result.check] += 1
                return []
            standing = Standing(source=source, check=result.check, item=result.item)
            items[result.item] = standing
        if result.verdict is Verdict.INFO:
            return self._passed(standing, at)
        if result.verdict is Verdict.ERROR:
            return self._not_run(standing, result, at)
        return self._failed(standing, result, at)

    def _failed(self, standing: Standing, result: Result, at: Seconds) -> list[Said]:
        standing.passing_since = standing.error_since = None
        told = standing.told
        if told is not None:
            worse = SEVERITY[result.verdict] > SEVERITY[told.verdict]
            if not worse and at - standing.told_at < self._by_name[standing.check].again_s:
                return []
        return self._tell(standing, result, at)

    def _not_run(self, standing: Standing, result: Result, at: Seconds) -> list[Said]:
        """Says nothing of what was told before: nobody has looked."""
        if standing.error_since is None:
            standing.error_since = at
        if standing.told is not None or at - standing.error_since < ERROR_S:
            return []
        return self._tell(standing, result, at)

    def _passed(self, standing: Standing, at: Seconds) -> list[Said]:
        standing.error_since = None
        if standing.told is None:
            self._forget(standing)
            return []
        if standing.passing_since is None:
            standing.passing_since = at
        if at - standing.passing_since < self._by_name[standing.check].clear_after_s:
            return []
        return [self._clear(standing, at)]

    def _tell(self, standing: Standing, result: Result, at: Seconds) -> list[Said]:
        standing.told, standing.told_at = result, at
        return [self._raised(result, 0.0)]

    def _clear(self, standing: Standing, at: Seconds) -> AlertCleared:
        self._forget(standing)
        self._cleared.append(Cleared(check=standing.check, item=standing.item, at=at))
        del self._cleared[:-ITEMS_MAX]
        return self._over(standing.check, standing.item)

    def _forget(self, standing: Standing) -> None:
        items = self._standings[standing.check]
        del items[standing.item]
        if not items:
            del self._standings[standing.check]

    # --- small ---

    def _all(self) -> Iterator[Standing]:
        return (each for items in self._standings.values() for each in items.values())

    def _extended(self, source: str, sample: Stamped[Any]) -> History[Any]:
        former = self._histories.get(source)
        if former is None:
            return History(first=sample, now=sample)
        keep = max(check.keep for check in self._by_source[source])
        past = (*former.past, former.now)
        return History(first=former.first, past=past[max(0, len(past) - keep) :], now=sample)

    def _raised(self, result: Result, age_s: Seconds) -> AlertRaised:
        alert = Alert(result=result, age_s=max(0.0, age_s))
        return AlertRaised(machine=self._machine, alert=alert)

    def _over(self, check: str, item: str) -> AlertCleared:
        return AlertCleared(machine=self._machine, check=check, item=item)
