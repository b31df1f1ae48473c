"""Asks sources and checks, and lets nothing out but samples and results that can be sent.

The one place where whatever a source or a check raises is caught: a defect in one of them must
cost its result and not the agent, which looks after the ranks. Used by the monitor, by the runner,
by children that take samples, and by `everstep check`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import msgspec

from everstep.agent.checks.check import AnyCheck, Here, History, Limits, NotReadable
from everstep.diagnosis.words import Verdict
from everstep.health import Counts, Result

ITEMS_MAX = 256
"""Results of one check that are looked at, fails first: the largest hosts have some 20 ports, 16
GPUs and 100 mounts, so more is a fault of the check."""
TEXT_BYTES_MAX = 1024
"""Of a sentence in a result; it may quote what a driver wrote."""
ITEM_BYTES_MAX = 256
SEVERITY: dict[Verdict, int] = {
    Verdict.ERROR: -1,
    Verdict.INFO: 0,
    Verdict.WARN: 1,
    Verdict.USER: 2,
    Verdict.JOB: 3,
    Verdict.SUSPECT: 4,
    Verdict.EVICT: 5,
}
"""What is worse than what, from the machine's point of view."""
_T = TypeVar("_T")


class Failed(NamedTuple):
    """Nothing came of it."""

    why: str
    """One clause."""
    defect: bool = False
    """Whether that is a fault of the program and not of what it looked at."""


def attempt(work: Callable[[], _T]) -> _T | Failed:
    """What it returns, or why it did not return."""
    try:
        return work()
    except NotReadable as reason:
        return Failed(_clean(str(reason) or "its signal cannot be read", TEXT_BYTES_MAX))
    except (OSError, ValueError) as error:
        return Failed(_clean(f"{error}" or type(error).__name__, TEXT_BYTES_MAX))
    except Exception as defect:  # noqa: BLE001 -- a defective check must not end the agent
        frames = traceback.extract_tb(defect.__traceback__)
        where = next((f for f in reversed(frames) if "/checks/" in f.filename), frames[-1])
        name = f"{where.filename.rpartition('/')[2]}:{where.lineno}"
        return Failed(
            _clean(f"it is defective: {type(defect).__name__} {defect} at {name}", TEXT_BYTES_MAX),
            defect=True,
        )


class Judgement(NamedTuple):
    """What one check says of one sample."""

    results: tuple[Result, ...]
    defect: bool = False
    dropped: int = 0
    """Results beyond the bound."""


def judge(check: AnyCheck, here: Here, history: History[Any]) -> Judgement:
    """Its results: bounded, weakened as its limits say, one for each item."""
    found = attempt(lambda: _found(check, here, history))
    if isinstance(found, Failed):
        return Judgement((check.could_not_run(found.why),), defect=found.defect)
    first = sorted(found, key=lambda result: not result.failed)[:ITEMS_MAX]
    return Judgement(tuple(first), dropped=len(found) - len(first))


def _found(check: AnyCheck, here: Here, history: History[Any]) -> list[Result]:
    seen = history
    if len(history.past) > check.keep:
        past = history.past[len(history.past) - check.keep :]
        seen = History(first=history.first, past=past, now=history.now)
    worst: dict[str, Result] = {}
    for each in check.judge(here, seen):
        result = fit(each, check.limits)
        former = worst.get(result.item)
        if former is None or SEVERITY[former.verdict] < SEVERITY[result.verdict]:
            worst[result.item] = result
    return list(worst.values())


def fit(result: Result, limits: Limits) -> Result:
    """The same, no worse than the limits allow, and such that it can be written and sent."""
    cleaned = msgspec.structs.replace(
        result,
        item=_clean(result.item, ITEM_BYTES_MAX),
        why=_clean(result.why, TEXT_BYTES_MAX),
        do=_clean(result.do, TEXT_BYTES_MAX),
        cause=_clean(result.cause, ITEM_BYTES_MAX),
        values={_clean(key, ITEM_BYTES_MAX): float(value) for key, value in result.values.items()},
    )
    return weakened(cleaned, limits)


def weakened(result: Result, limits: Limits) -> Result:
    """The same, no worse than the limits allow.

    What may not evict by itself may not evict by being counted either.
    """
    if SEVERITY[limits.at_most] >= SEVERITY[Verdict.EVICT]:
        return result
    verdict = result.verdict
    if result.failed and SEVERITY[verdict] > SEVERITY[limits.at_most]:
        verdict = limits.at_most
    return msgspec.structs.replace(result, verdict=verdict, counts=Counts.NEVER)


def not_read(checks: Iterable[AnyCheck], why: str) -> tuple[Result, ...]:
    """What all checks of a source say if it gave no sample."""
    return tuple(check.could_not_run(why) for check in checks)


def _clean(text: str, most: int) -> str:
    """Names of files and lines of drivers may hold bytes that are no text."""
    return text.encode(errors="replace")[:most].decode(errors="ignore")
