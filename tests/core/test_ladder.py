"""The table of the ladder, and how it is climbed; whole stories are in tests/transcripts."""

from __future__ import annotations

from itertools import pairwise

import pytest

from everstep.actions import Rung
from everstep.core.ladder import HEIGHT, LADDER, NOT_YET, Ground, Result, Row

ALWAYS = {Rung.EVICT, Rung.EVICT_AGGREGATED, Rung.EVICT_TESTED, Rung.EVICT_REPLAYED}
ALWAYS |= {Rung.REATTEMPT, Rung.HUMAN, *NOT_YET}
"""Rungs that nothing can speak against, once they can be taken at all."""


def test_every_ground_and_every_result_has_one_row() -> None:
    keys = [(row.after, row.result) for row in LADDER]
    assert len(keys) == len(set(keys))
    assert {after for after, result in keys if result is None} == set(Ground)
    again = {after for after, result in keys if result is Result.FAILS_AGAIN}
    starts = set(Rung) - {Rung.RERUN, Rung.AGGREGATE, Rung.TEST, Rung.REPLAY, Rung.HUMAN}
    assert again == starts, "after whatever starts ranks it is known what follows"


@pytest.mark.parametrize("row", LADDER, ids=lambda row: f"{row.after} {row.result or ''}")
def test_no_row_ends_in_nothing(row: Row) -> None:
    assert row.take[-1] in ALWAYS


@pytest.mark.parametrize("row", LADDER, ids=lambda row: f"{row.after} {row.result or ''}")
def test_no_row_leads_down(row: Row) -> None:
    """But for trying again, which is left when nothing else is, until a guard speaks."""
    below = 0 if isinstance(row.after, Ground) else HEIGHT[row.after]
    climbs = [rung for rung in row.take if rung is not Rung.REATTEMPT]
    assert all(HEIGHT[rung] >= below for rung in climbs)


@pytest.mark.parametrize("row", LADDER, ids=lambda row: f"{row.after} {row.result or ''}")
def test_the_cheaper_explanation_comes_first(row: Row) -> None:
    known = [rung for rung in row.take if rung is not Rung.REATTEMPT]
    if row.after is not Ground.CODE and row.result is not Result.CODE:
        assert all(HEIGHT[one] <= HEIGHT[other] for one, other in pairwise(known))
