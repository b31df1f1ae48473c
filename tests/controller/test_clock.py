"""The controller's time only grows."""

from __future__ import annotations

import time

import pytest

from everstep.controller.clock import Clock


def test_time_is_the_wall_clocks_if_the_journal_is_not_ahead() -> None:
    assert Clock(not_before=5.0).now() == pytest.approx(time.time(), abs=5.0)


def test_time_never_falls_below_the_journals_last_one_even_if_the_wall_clock_was_set_back() -> None:
    ahead = time.time() + 86400.0
    clock = Clock(not_before=ahead)
    first, second = clock.now(), clock.now()
    assert ahead <= first <= second


def test_setting_the_wall_clock_while_it_runs_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    before = clock.now()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert clock.now() >= before
