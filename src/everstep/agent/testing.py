"""Tests this machine while no rank runs on it: is it as sound as one that was never evicted?

Used by effects.py for TestMachine. A test has parts, the cheapest first: the first that finds
something ends it. Now there is one, the same look with all checks as `everstep check` takes; parts
that burn in GPUs or compare bits of collectives belong after it, behind the same order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from everstep.agent.checks.check import AnyCheck, Here
from everstep.agent.checks.looking import Looking
from everstep.agent.checks.monitor import Monitor, Remembered
from everstep.diagnosis.words import Verdict
from everstep.health import Result
from everstep.model import MachineId, Seconds

GRAVE = (Verdict.EVICT, Verdict.SUSPECT)
"""Verdicts that fail a test."""
LOOK_WITHIN_S: Seconds = 60.0
"""Most time for one look with all checks: children may have to be started on a busy machine."""


class Told(NamedTuple):
    """What came of a test, or of a part of it."""

    passed: bool | None
    """None: it could not be told."""
    why: str
    """One clause."""


Part = Callable[[Seconds], Coroutine[Any, Any, Told]]
"""One part: gets the time that is left."""


class Checked(NamedTuple):
    """What the first part needs of the agent's running checks."""

    checks: Sequence[AnyCheck]
    here: Callable[[], Here]
    """The machine as it is now."""
    directory: Path
    """Of the machine: children are known by it."""
    remembered: Callable[[], Remembered]
    """What the running checks know: counters are compared with what they were at the start."""


class Testing:
    """The tests of one machine."""

    __test__ = False  # for pytest: these are no tests

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    async def test(self, within_s: Seconds) -> Told:
        """Part after part; the answer comes within about `within_s`."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + within_s
        told: list[str] = []
        for part in self._parts:
            try:
                async with asyncio.timeout_at(deadline):
                    tested = await part(deadline - clock())
            except TimeoutError:
                return Told(None, f"the test did not end within {within_s:g} s")
            if not tested.passed:
                return tested
            told.append(tested.why)
        return Told(True, "; ".join(told)) if told else Told(None, "there is nothing to test")


def all_checks(checked: Checked) -> Part:
    """The part that looks once with every check."""

    async def look(within_s: Seconds) -> Told:
        return await _look(checked, within_s)

    return look


async def _look(checked: Checked, within_s: Seconds) -> Told:
    if not checked.checks:
        return Told(None, "checks are off in this job")
    remembered = checked.remembered()
    holding = [each.told for each in remembered.standings if each.told is not None]
    found = _grave(holding)
    if found is not None:
        # A child beside one that hangs in a driver would hang as well.
        return Told(False, f"its checks say so all the time: {_clause(found)}")
    monitor = Monitor(MachineId(""), checked.checks, Remembered(histories=remembered.histories))
    looking = Looking(checked.checks, monitor, checked.directory)
    limit_s = min(LOOK_WITHIN_S, 0.8 * within_s)
    try:
        await looking.look(checked.here(), limit_s, f"there was no answer within {limit_s:g} s")
    finally:
        await looking.close()
    return _verdict(looking)


def _verdict(looking: Looking) -> Told:
    results = looking.results
    found = _grave(results)
    if found is not None:
        return Told(False, _clause(found))
    if looking.late:
        return Told(None, f"{', '.join(sorted(looking.late))} gave no answer in time")
    ran = {each.check for each in results if each.verdict is not Verdict.ERROR}
    if not ran:
        return Told(None, "no check could run")
    return Told(True, f"{len(ran)} checks looked and found nothing")


def _grave(results: Sequence[Result]) -> Result | None:
    """The gravest, if any fails a test."""
    grave = [each for verdict in GRAVE for each in results if each.verdict is verdict]
    return grave[0] if grave else None


def _clause(result: Result) -> str:
    of = f" of {result.item}" if result.item else ""
    return f"{result.check} says{of}: {result.why}"
