"""Differences of counters. For every judge here: a counter's own value says nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from everstep.agent.checks.check import History, Limits, S
from everstep.model import Seconds

WRAP = 1 << 32
"""Some cards count 32 bits wide."""
SILENT_S: Seconds = 10.0
"""Between two samples of a source that looks every second: for so long it did not answer."""


def growth(old: int | None, new: int | None) -> int | None:
    """By how much a counter has grown; None if that cannot be said.

    A smaller value is a reset, unless it went from the upper half of 32 bits to the lower one.
    """
    if old is None or new is None:
        return None
    if new >= old:
        return new - old
    if WRAP // 2 <= old < WRAP and new < WRAP // 2:
        return new + WRAP - old
    return None


def rates(
    old: Mapping[str, int], new: Mapping[str, int], names: Iterable[str], seconds: Seconds
) -> dict[str, float]:
    """Growth per second of those counters that can be compared."""
    grown = {name: growth(old.get(name), new.get(name)) for name in names}
    return {name: each / seconds for name, each in grown.items() if each is not None}


def too_fast(found: Mapping[str, float], limits: Limits) -> dict[str, float]:
    """Those above their limit, the field NAME_per_s."""
    return {name: rate for name, rate in found.items() if rate > getattr(limits, f"{name}_per_s")}


def total(old: Mapping[str, int], new: Mapping[str, int], names: Iterable[str]) -> int | None:
    """By how much these counters have grown together; None if none of them can be compared.

    A reset of one is taken as a reset of all.
    """
    both = [name for name in names if name in old and name in new]
    grown = [growth(old[name], new[name]) for name in both]
    known = [each for each in grown if each is not None]
    return sum(known) if known and len(known) == len(grown) else None


def just_before(history: History[S]) -> S | None:
    """The sample before, unless nobody could look for a while.

    What happened in that time belongs to what kept us from looking, and that has been told.
    """
    if not history.past or history.now.at - history.past[-1].at > SILENT_S:
        return None
    return history.past[-1].sample
