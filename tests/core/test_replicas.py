"""Which ranks hold the same, in few bytes, and whether they do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.core.replicas import differing
from everstep.model import Rank, Replicated, Span, ranks_in, spans_of


@given(st.sets(st.integers(0, 40)))
def test_spans_are_the_same_ranks(ranks: set[int]) -> None:
    spans = spans_of(map(Rank, ranks))
    assert list(ranks_in(spans)) == sorted(ranks)
    assert len(spans) <= (len(ranks) + 1) // 2


def test_a_group_of_a_thousand_ranks_is_one_span() -> None:
    group = [Rank(3 + 8 * number) for number in range(1000)]
    assert spans_of(group) == (Span(first=Rank(3), count=1000, stride=8),)


def said(rank: int, digest: str = "same", replicas: tuple[int, ...] = (0, 1, 2)) -> Replicated:
    return Replicated(rank=Rank(rank), replicas=spans_of(map(Rank, replicas)), digest=digest)


def test_replicas_are_equal_if_all_of_them_say_the_same() -> None:
    assert differing([]) == ""
    assert differing([said(0), said(1), said(2)]) == ""
    assert differing([said(0), said(1), said(2), said(0, "a", (0, 3)), said(3, "a", (0, 3))]) == ""


def test_one_that_has_something_else_is_named() -> None:
    assert "ranks 0 and 2 do not hold the same" in differing([said(0), said(1), said(2, "other")])


def test_one_that_knows_nothing_of_it_is_missed() -> None:
    assert "only 2 of 3 ranks, rank 0 among them" in differing([said(0), said(1)])
    assert "only 1 of 2 ranks" in differing([said(0, "a", (0, 1)), said(1, "a", (1, 2))])
