"""Each case of a hang gets an answer that does no harm, from dumps or from watchdogs' lines alone.

The cases lie in cases/NN-name/, each with the inputs and an expect.toml; the keys of that are those
of the case set of the project. What is judged here are the analysers; the judge that weighs their
findings against logs has tests of its own over all cases.
"""

from __future__ import annotations

import gzip
import tomllib
from pathlib import Path
from typing import Any

import pytest

from everstep.diagnosis.dumps import Dumps
from everstep.diagnosis.findings import Finding, Site
from everstep.diagnosis.silence import Ledger
from everstep.diagnosis.words import FirstAction, Role

CASES = Path(__file__).parent / "cases"
KINDS = ("stack_dump", "flight_recorder")
BY_LINES = ("12-", "15-", "21-", "31-", "32-", "33-", "27", "28")
"""Cases whose logs say it themselves, in lines of the collective ledger."""


def _expected(case: Path) -> dict[str, Any]:
    return tomllib.loads((case / "expect.toml").read_text())


HANGS = sorted(
    case.name for case in CASES.iterdir() if case.is_dir() and _expected(case)["kind"] in KINDS
)


def _site(expected: dict[str, Any]) -> Site:
    layout = expected.get("layout", {})
    return Site(
        world_size=layout.get("world_size"),
        ranks_per_machine=layout.get("ranks_per_machine"),
        hosts=tuple(layout.get("hosts", ())),
    )


def _findings(case: Path, site: Site) -> list[Finding]:
    dumps, ledger = Dumps(), Ledger()
    for file in sorted(case.rglob("*")):
        if not file.is_file() or file.name == "expect.toml":
            continue
        data = file.read_bytes()
        if file.suffix == ".gz":
            data = gzip.decompress(data)
        if not dumps.take(str(file.relative_to(case)), data):
            ledger.take(str(file.relative_to(case)), data)
    return dumps.findings(site) or ledger.findings(site)


@pytest.mark.parametrize("name", HANGS)
def test_a_hang_is_judged_as_a_careful_reader_would(name: str) -> None:
    expected = _expected(CASES / name)
    site = _site(expected)
    findings = _findings(CASES / name, site)
    assert findings
    first = findings[0]
    assert first.category in {expected["category"], *expected["also_acceptable"]}, first.why
    assert first.action in {expected["first_action"], *expected["acceptable_actions"]}, first.why
    ranks = {*expected["accused_ranks"], *expected.get("tolerated_ranks", ())}
    machines = {*expected["accused_machines"], *expected.get("tolerated_machines", ())}
    machines |= {site.host_of(rank) for rank in ranks} - {None}
    innocent = [
        r for r in first.accused_ranks if r not in ranks and site.host_of(r) not in machines
    ]
    assert not innocent, first.why
    assert set(first.accused_machines) <= machines, first.why


@pytest.mark.parametrize("name", HANGS)
def test_one_root_at_most_and_never_an_eviction(name: str) -> None:
    findings = _findings(CASES / name, _site(_expected(CASES / name)))
    assert sum(finding.role is Role.ROOT for finding in findings) <= 1
    assert all(finding.action is not FirstAction.EVICT_MACHINE for finding in findings)
