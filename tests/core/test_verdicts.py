"""How long ranks that do not move are borne with, by what they do."""

from __future__ import annotations

from itertools import cycle

import pytest

from everstep.actions import CollectStacks, SendStacks
from everstep.core.state import Phase
from everstep.model import MachineId
from tests.core.test_stalls import Job

STOOD_AT = 20.0
BOTH = (MachineId("m0"), MachineId("m1"))


def stopped_after(shows: str, *others: str, more: str = "") -> float:
    """How long a stall lasts in which rank 1 shows this at every look, until it is given up. Rank 0
    shows these in turn.
    """
    job = Job(f"> 4 progress 0\n> 20 progress 30\n{more}")
    now, turns = STOOD_AT, cycle(others or ("barrier",))
    while job.core.state.phase is Phase.RUNNING:
        assert now < 2000.0, "it is left for ever"
        now = job.core.next_deadline() or 2000.0
        job.run(f"> {now} TimerFired\n")
        if any(isinstance(order, CollectStacks) for order in job.core.outstanding(BOTH[0])):
            job.run(f"> {now} looked m0 m1 {next(turns)}=0 {shows}=1\n")
        for name in BOTH:
            if any(isinstance(order, SendStacks) for order in job.core.outstanding(name)):
                job.run(f"> {now} texts {name}\n")
    return now - STOOD_AT


@pytest.mark.parametrize(
    "shows", ["compute/T", "all_reduce+worker_idle/T", "lock", "loader+worker_idle", "exit"]
)
def test_what_never_ends_by_itself_is_given_up_at_once(shows: str) -> None:
    assert stopped_after(shows) < 15.0


@pytest.mark.parametrize(
    "shows", ["reading/D", "compute/R", "loader+worker_busy/R", "loader+worker_busy/D", "compute/t"]
)
def test_what_may_take_a_minute_gets_it(shows: str) -> None:
    """A storage that is slow, a loop in Python, a data loader, a person with a debugger."""
    assert 60.0 <= stopped_after(shows) < 100.0


@pytest.mark.parametrize("others", ["barrier", "saving"])
def test_a_checkpoint_that_nobody_told_of_gets_ten_minutes(others: str) -> None:
    """One rank writes while the other waits, or both write: it looks the same for minutes."""
    for shows in ("saving/D", "saving/S"):
        assert 600.0 <= stopped_after(shows, others) < 1250.0


def test_of_a_phase_that_ranks_tell_of_it_is_known_how_long_it_takes() -> None:
    more = "> 20 progress 30 phase=saving\n> 30 progress 31\n> 31 progress 31 phase=saving\n"
    assert 60.0 <= stopped_after("saving/D", more=more) < 150.0


def test_ranks_that_show_nothing_at_all_get_ten_minutes() -> None:
    assert stopped_after("", "") >= 600.0


def test_ranks_that_spin_while_they_wait_do_not_move() -> None:
    """A look finds each in another function of the driver, and in the same wait."""
    assert stopped_after("compute/T", "spins", "spins_on") < 15.0
