"""Every second has exactly one owner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.ettr import Owner, TimeAccount, ettr, spent


def test_seconds_go_to_the_owner_of_their_time() -> None:
    account = TimeAccount()
    account.switch(Owner.RESTARTING, 10.0)
    account.switch(Owner.TRAINING, 12.0)
    account.switch(Owner.DETECTING, 20.0, "incident-1")
    account.switch(Owner.TRAINING, 20.5)
    totals = spent(account, 30.0)
    assert totals[Owner.RESTARTING] == 2.0
    assert totals[Owner.TRAINING] == 17.5
    assert spent(account, 30.0, incident="incident-1")[Owner.DETECTING] == 0.5
    assert ettr(account, 30.0) == 17.5 / 20.0


def test_a_fact_about_the_past_moves_the_switch_back_but_not_past_settled_time() -> None:
    account = TimeAccount()
    account.switch(Owner.RESTARTING, 0.0)
    account.switch(Owner.TRAINING, 10.0)
    account.switch(Owner.DETECTING, 5.0)
    assert spent(account, 20.0)[Owner.RESTARTING] == 10.0
    assert spent(account, 20.0)[Owner.DETECTING] == 10.0


def test_what_was_cut_off_is_carved_out_of_training() -> None:
    account = TimeAccount()
    account.switch(Owner.TRAINING, 0.0)
    account.switch(Owner.DETECTING, 10.0, "incident-1")
    account.switch(Owner.RESTARTING, 11.0, "incident-1")
    account.carve(Owner.RECOMPUTING, 9.5, "incident-1")
    assert spent(account, 12.0)[Owner.TRAINING] == 9.5
    assert spent(account, 12.0)[Owner.RECOMPUTING] == 0.5


@pytest.mark.parametrize("at", [-1.0, 0.0, 10.0, 11.0])
def test_nothing_is_carved_where_there_was_no_training(at: float) -> None:
    account = TimeAccount()
    account.switch(Owner.TRAINING, 0.0)
    account.carve(Owner.RECOMPUTING, 5.0, "")
    account.switch(Owner.DETECTING, 10.0)
    account.carve(Owner.RECOMPUTING, at, "")
    assert [segment.owner for segment in account.segments] == [Owner.TRAINING, Owner.DETECTING]


def test_after_the_end_no_second_is_counted() -> None:
    account = TimeAccount()
    assert ettr(account, 5.0) is None
    account.switch(Owner.TRAINING, 0.0)
    account.end(10.0)
    account.end(20.0)
    account.switch(Owner.PAUSED, 30.0)
    assert sum(spent(account, 100.0).values()) == 10.0


def test_the_window_counts_the_last_hour_only() -> None:
    account = TimeAccount()
    account.switch(Owner.RESTARTING, 0.0)
    account.switch(Owner.TRAINING, 1000.0)
    assert ettr(account, 2000.0, window_s=500.0) == 1.0
    assert ettr(account, 2000.0) == 0.5


@given(st.lists(st.tuples(st.sampled_from(Owner), st.floats(0, 100), st.booleans()), min_size=1))
def test_owners_always_add_up_to_the_wall_clock(
    switches: list[tuple[Owner, float, bool]],
) -> None:
    account = TimeAccount()
    account.switch(Owner.WAITING, 0.0)
    for owner, at, carve in switches:
        if carve:
            account.carve(owner, at, "incident-1")
        else:
            account.switch(owner, at)
    starts = [segment.since for segment in account.segments]
    assert starts == sorted(starts)
    assert sum(spent(account, 200.0).values()) == pytest.approx(200.0)
