"""The number of standbys: what the paper has for its sizes, and what a history makes of it."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from everstep.core.standby import ENOUGH, failure_rate, percentile, pool, standbys_at_first
from everstep.core.state import State
from tests.transcripts.transcript import Transcript

START = """
> 0 job nnodes=2 nproc=1 standbys=0 disk_every=0
> 1 join m0 m1
> 2 stopped m0 m1
> 3 started m0 m1
"""
DAY_S = 86400.0


@pytest.mark.parametrize(("machines", "standbys"), [(128, 2), (256, 2), (512, 3), (1024, 4)])
def test_the_pools_of_the_paper(machines: int, standbys: int) -> None:
    """ByteRobust, table 5; before the job has told anything."""
    assert percentile(machines, failure_rate(0, 0.0)) == standbys


@pytest.mark.parametrize("machines", [1, 2, 3, 17, 400])
@pytest.mark.parametrize("rate", [1e-6, 0.00125, 0.03, 0.5, 0.9, 1.0])
def test_it_is_the_percentile_of_the_binomial(machines: int, rate: float) -> None:
    def below(most: int) -> float:
        terms = (
            math.comb(machines, k) * rate**k * (1 - rate) ** (machines - k) for k in range(most + 1)
        )
        return math.fsum(terms)

    found = percentile(machines, rate)
    assert 0 <= found <= machines
    assert below(found) >= ENOUGH - 1e-9
    assert found == 0 or below(found - 1) < ENOUGH


def test_a_hundred_thousand_machines_are_no_trouble() -> None:
    assert 3_100 < percentile(100_000, 0.03) < 3_200


def _auto(standbys: int = 0) -> State:
    run = Transcript()
    run.run(START)
    state = run.core.state
    assert state.spec is not None
    state.spec = replace(state.spec, auto_standbys=True, standbys=standbys, nnodes=400)
    return state


def test_failures_make_the_pool_larger_and_good_days_smaller() -> None:
    state = _auto()
    assert state.spec is not None
    assert standbys_at_first(state.spec) == pool(state, 3.0).wanted == 3
    quiet = pool(state, 100 * DAY_S)
    assert quiet.wanted == 1
    run = Transcript()
    run.run(START + "> 10 MachineLost m1 witness=gone\n")
    state.evictions = run.core.state.evictions * 30
    bad = pool(state, 1 * DAY_S)
    assert bad.wanted > 15
    assert bad.why == "99% of days need no more at 0.026 failures per machine and day"
    for record in state.evictions:
        record.guilty = False
    assert pool(state, 1 * DAY_S).wanted < bad.wanted


def test_the_given_number_is_the_least_or_the_only_one() -> None:
    state = _auto(standbys=7)
    assert pool(state, 3.0).wanted == 7
    assert state.spec is not None
    state.spec = replace(state.spec, auto_standbys=False)
    told = pool(state, 3.0)
    assert (told.wanted, told.why, standbys_at_first(state.spec)) == (7, "", 7)


def test_a_small_job_has_one() -> None:
    state = _auto()
    assert state.spec is not None
    state.spec = replace(state.spec, nnodes=2)
    assert pool(state, 1000 * DAY_S).wanted == 1
