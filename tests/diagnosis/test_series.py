"""Every case that is about training's numbers gets the right answer from the numbers alone.

What is judged here is the analyser; the judge that weighs it against all other lines has tests of
its own. A case of another kind in which training is reported must give no cause at all.
"""

from __future__ import annotations

import gzip
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.diagnosis.findings import Finding, Site
from everstep.diagnosis.series import Collector
from everstep.diagnosis.words import Category, FirstAction, Role

CASES = Path(__file__).parent / "cases"


def _expected(case: Path) -> dict[str, Any]:
    return tomllib.loads((case / "expect.toml").read_text("utf-8"))


ALL = sorted(expect.parent for expect in CASES.glob("*/expect.toml"))
FROM_THE_SET = {22, 23, 24, 44}
NUMBERS = [
    case.name
    for case in ALL
    if (number := int(case.name.partition("-")[0])) in FROM_THE_SET or 300 < number < 340
]
OTHERS = [
    case.name
    for case in ALL
    if _expected(case)["kind"] not in {"metric_series", "slow_node"}
    and _expected(case)["category"] not in {"nan_value", "mfu_decline"}
]


def _found(name: str) -> list[Finding]:
    case = CASES / name
    layout = _expected(case).get("layout", {})
    collector = Collector()
    for file in sorted(case.rglob("*")):
        if file.is_dir() or file.name == "expect.toml":
            continue
        raw = file.read_bytes()
        text = (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode(errors="replace")
        for number, line in enumerate(text.split("\n"), 1):
            collector.line(file.name, line, number)
    site = Site(
        world_size=layout.get("world_size"),
        ranks_per_machine=layout.get("ranks_per_machine"),
        hosts=tuple(layout.get("hosts", ())),
    )
    return collector.findings(site)


def _weight(finding: Finding) -> int:
    return [Role.ROOT, Role.CONFIRM, Role.ECHO, Role.NOISE].index(finding.role)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_case_is_answered_rightly_from_its_numbers(name: str) -> None:
    expected = _expected(CASES / name)
    found = sorted(_found(name), key=_weight)
    assert found, "nothing was read"
    first = found[0]
    told = f"{first.rule}, {first.category}, {first.action}: {first.why}"
    assert first.category in {expected["category"], *expected["also_acceptable"]}, told
    assert first.action in {expected["first_action"], *expected["acceptable_actions"]}, told
    for what, accused in (("ranks", first.accused_ranks), ("machines", first.accused_machines)):
        known = {*expected[f"accused_{what}"], *expected.get(f"tolerated_{what}", [])}
        assert set(accused) <= known, told
        assert set(accused) or not expected[f"accused_{what}"], f"named nobody: {told}"


@pytest.mark.parametrize("name", sorted(set(OTHERS) - set(NUMBERS)))
def test_numbers_of_a_job_that_failed_otherwise_name_no_cause(name: str) -> None:
    causes = [f.why for f in _found(name) if f.role is Role.ROOT]
    assert not causes


def test_a_rank_whose_own_loss_is_not_finite_is_told_and_not_accused() -> None:
    collector = Collector()
    for step in range(60):
        for rank in range(4):
            loss = "nan" if rank == 2 and step > 40 else "2.5"
            collector.line("train.log", f"rank={rank} step={step} loss={loss}", step * 4 + rank)
    (found,) = [f for f in collector.findings(Site()) if f.role is Role.ROOT]
    assert found.category is Category.NAN_VALUE
    assert found.action is FirstAction.STOP_TIME_CHECK
    assert not found.accused_ranks
    assert "rank 2" in found.why


@pytest.mark.parametrize(("slow", "accused"), [("host", ("h3",)), ("rank", ())])
def test_what_stays_with_a_machine_is_the_machine_and_what_follows_a_rank_is_not(
    slow: str, accused: tuple[str, ...]
) -> None:
    collector = Collector()
    collector.line("times.csv", "attempt,host,rank,compute_s", 1)
    for attempt, hosts in ((1, ("h1", "h2", "h3", "h4")), (2, ("h3", "h1", "h4", "h2"))):
        for rank, host in enumerate(hosts):
            is_slow = host == "h3" if slow == "host" else rank == 2
            line = f"{attempt},{host},{rank},{2.6 if is_slow else 1.9}"
            collector.line("times.csv", line, attempt * 10 + rank)
    (found,) = collector.findings(Site())
    assert found.accused_machines == accused
    assert found.action is (FirstAction.STOP_TIME_CHECK if accused else FirstAction.ASK_USER)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.text(max_size=80), max_size=8))
def test_no_text_whatever_breaks_the_collector(lines: list[str]) -> None:
    collector = Collector()
    for number, line in enumerate(["step,loss,host", *lines, "step 3 loss 2.0"]):
        collector.line("a.csv", line, number)
        collector.line("b.log", line * 3, number)
    collector.findings(Site())


def test_a_log_without_numbers_gives_nothing() -> None:
    collector = Collector()
    for number, line in enumerate(("Traceback (most recent call last):", "KeyError: 'loss'", "")):
        collector.line("train.log", line, number)
    assert collector.findings(Site()) == []
