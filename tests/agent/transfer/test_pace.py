"""The token bucket over any sequence of sends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.agent.transfer.pace import BURST_S, TokenBucket


@given(
    rate=st.floats(1e3, 1e9),
    sends=st.lists(st.tuples(st.integers(1, 1 << 22), st.floats(0, 0.5)), min_size=1, max_size=50),
)
def test_never_more_than_the_rate_allows_beyond_one_piece(
    rate: float, sends: list[tuple[int, float]]
) -> None:
    bucket, now, sent = TokenBucket(rate), 100.0, 0
    for size, pause_s in sends:
        now += pause_s
        now += bucket.take(size, now)
        sent += size
        assert sent <= rate * (now - 100.0 + BURST_S) * (1 + 1e-9) + 1


def test_who_sends_all_the_time_gets_the_whole_rate() -> None:
    bucket, now = TokenBucket(1e6), 0.0
    for _ in range(100):
        now += bucket.take(1 << 20, now)
    assert abs(100 * (1 << 20) / now / 1e6 - 1) < 0.01


def test_without_a_limit_nobody_waits() -> None:
    bucket = TokenBucket(0)
    assert [bucket.take(1 << 40, 0.0) for _ in range(3)] == [0.0] * 3
