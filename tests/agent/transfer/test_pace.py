"""The token bucket over any sequence of sends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.agent.transfer.pace import (
    BURST_S,
    LEAST_BYTES_PER_S,
    LOOK_EVERY_S,
    TokenBucket,
    rate_for,
)


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


def test_a_backup_is_spread_over_its_time_within_limits() -> None:
    assert rate_for(1 << 40, 1000.0, 0.0) == (1 << 40) / 1000
    assert rate_for(1 << 40, 1000.0, 1e6) == 1e6
    assert rate_for(1 << 20, 1000.0, 0.0) == LEAST_BYTES_PER_S
    assert rate_for(1 << 40, 0.0, 0.0) == 0.0
    assert rate_for(1 << 40, 0.0, 1e6) == 1e6


def test_while_ranks_communicate_transfers_wait_but_not_for_ever() -> None:
    busy = True
    bucket, now = TokenBucket(0, busy=lambda: busy, yields_s=0.5), 100.0
    assert bucket.paces
    for _ in range(3):  # several transfers wait at the same time, which counts once
        assert bucket.hold(now) == LOOK_EVERY_S
    waited = 0
    while pause_s := bucket.hold(now):
        now += pause_s
        waited += 1
        if waited == 100:
            busy = False
            assert bucket.hold(now) == 0.0
            busy = True
    assert abs(waited * LOOK_EVERY_S - 0.5) < 0.01


def test_without_a_limit_nobody_waits() -> None:
    bucket = TokenBucket(0)
    assert [bucket.take(1 << 40, 0.0) for _ in range(3)] == [0.0] * 3
    assert not bucket.paces
