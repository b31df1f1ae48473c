"""Sources and checks that do what the files below their root say, beside no real one.

The command of test_check.py: `python -c "from tests.commands.odd_checks import main; main()" ...`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from everstep import cli
from everstep.agent.checks import registry
from everstep.agent.checks.check import (
    Check,
    Here,
    History,
    Limits,
    MakeCheck,
    MakeSource,
    NotReadable,
    Source,
)
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result
from everstep.model import Seconds, Value


class Number(Value, frozen=True, kw_only=True):
    """A sample."""

    value: int


class Counter(Source[Number]):
    """The number in the file `counter`; absent without it."""

    name: ClassVar[str] = "counter"
    kind: ClassVar[type[Value]] = Number
    every_s: ClassVar[Seconds] = 2.0

    def absent(self, here: Here) -> str:
        return "" if here.path("/counter").exists() else "there is no counter"

    def sample(self, here: Here) -> Number:
        return Number(value=int(here.path("/counter").read_text()))


class Child(Counter):
    """The same, in a child process."""

    name: ClassVar[str] = "child"
    blocks: ClassVar[bool] = True


class Hung(Counter):
    """Never answers; absent without the file `hung`."""

    name: ClassVar[str] = "hung"
    blocks: ClassVar[bool] = True
    within_s: ClassVar[Seconds] = 0.2

    def absent(self, here: Here) -> str:
        return "" if here.path("/hung").exists() else "nothing hangs here"

    def sample(self, here: Here) -> Number:
        threading.Event().wait()
        raise NotReadable

    def unanswered(self, for_s: Seconds, times: int) -> Result | None:
        return Result(
            check="odd.hung",
            verdict=Verdict.EVICT,
            why="the driver does not answer",
            do="Replace the machine.",
        )


class Slow(Hung):
    """The same, and it may take long; absent without the file `slow`."""

    name: ClassVar[str] = "slow"
    within_s: ClassVar[Seconds] = 60.0

    def absent(self, here: Here) -> str:
        return "" if here.path("/slow").exists() else "nothing is slow here"

    def sample(self, here: Here) -> Number:
        here.path("/slow").write_text(f"{os.getpid()}")
        return super().sample(here)


class Secret(Counter):
    """A file that only root reads; absent without it."""

    name: ClassVar[str] = "secret"

    def absent(self, here: Here) -> str:
        return "" if here.path("/secret").exists() else "there is no secret"

    def sample(self, here: Here) -> Number:
        return Number(value=int(here.path("/secret").read_text()))


class Steps(Limits, frozen=True, kw_only=True):
    """Thresholds of the checks here."""

    most: int = 5
    """More steps than this since the look before are suspect."""


class Growth(Check[Number, Steps]):
    """Of a counter since the look before; by more than 100 it evicts."""

    name: ClassVar[str] = "odd.growth"
    source: ClassVar[str] = "counter"
    about: ClassVar[str] = "a counter grows (counter)"
    limits_type: ClassVar[type[Limits]] = Steps

    def judge(self, here: Here, history: History[Number]) -> Iterable[Result]:
        if not history.past:
            yield self.passed("there is nothing to compare with yet")
            return
        grown = history.now.sample.value - history.past[-1].sample.value
        if grown <= self.limits.most:
            yield self.passed(f"it grew by {grown}", grown=grown)
            return
        verdict = Verdict.EVICT if grown > 100 else Verdict.SUSPECT
        why = f'it grew by {grown}, more than {self.limits.most} | "quoted"'
        yield self.found(verdict, Category.NONE, why, "Look at the counter.")


class GrowthInChild(Growth):
    """The same for the other source."""

    name: ClassVar[str] = "odd.growth_in_child"
    source: ClassVar[str] = "child"


class Answers(Check[Number, Limits]):
    """Passes whenever there is a sample."""

    name: ClassVar[str] = "odd.hung"
    source: ClassVar[str] = "hung"
    about: ClassVar[str] = "a driver hangs (hung)"

    def judge(self, here: Here, history: History[Number]) -> Iterable[Result]:
        yield self.passed(f"it says {history.now.sample.value}")


class Soon(Answers):
    """The same for what is slow."""

    name: ClassVar[str] = "odd.slow"
    source: ClassVar[str] = "slow"


class Readable(Answers):
    """The same for the file of root."""

    name: ClassVar[str] = "even.secret"
    source: ClassVar[str] = "secret"


ODD_SOURCES: tuple[MakeSource, ...] = (Counter, Child, Hung, Slow, Secret)
ODD_CHECKS: tuple[MakeCheck, ...] = (Growth, GrowthInChild, Answers, Soon, Readable)


def add(setitem: Callable[[dict[str, Any], str, Any], None]) -> None:
    """To what the registry has."""
    for source in ODD_SOURCES:
        setitem(registry.SOURCES, source.name, source)
    for check in ODD_CHECKS:
        setitem(registry.CHECKS, check.name, check)


def main() -> None:
    """The command with these and no others."""
    registry.SOURCES.clear()
    registry.CHECKS.clear()
    add(dict.__setitem__)
    cli.main()
