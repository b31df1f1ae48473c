"""Histories for tests of judges, and what a judge makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from everstep.agent.checks.check import AnyCheck, Here, History, Stamped
from everstep.health import Counts, Result

HERE = Here()


def judge(
    check: AnyCheck, samples: Sequence[Any], every_s: float = 1.0, here: Here = HERE
) -> list[Result]:
    """Results at the last of these samples; the first is the baseline as well."""
    stamped = [Stamped(at=number * every_s, sample=sample) for number, sample in enumerate(samples)]
    history = History(first=stamped[0], past=tuple(stamped[:-1][-check.keep :]), now=stamped[-1])
    return list(check.judge(here, history))


def said(results: Sequence[Result]) -> dict[str, str]:
    """Item -> verdict, with a + if it counts twice."""
    plus = {Counts.NEVER: "", Counts.TWICE: "+", Counts.WITH_SLOWDOWN: "~"}
    for result in results:
        assert result.why
        assert bool(result.do) or not result.failed, "every fail names a next step"
    return {result.item: f"{result.verdict}{plus[result.counts]}" for result in results}
