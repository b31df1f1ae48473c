"""Real hangs and slow-downs of a real job: who is named for it, who goes, and where it goes on.

One job for all of them, in any order: each ends with training that goes on. At its end every step
of every rank has the bits of a run that nobody disturbed, and nothing of the job is left.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from everstep.events import ControllerStarted
from everstep.looks import LookResult
from everstep.processes import alive
from tests.integration.hung import POLICY, Hung, hung, machine_of, process_of
from tests.integration.support import wait_for
from tests.integration.wedged import Trouble

pytestmark = pytest.mark.torch
EVERYBODY = range(8)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hung]:
    with hung(tmp_path_factory.mktemp("hung")) as running:
        yield running
        running.finish()
    running.is_as_undisturbed()


def test_a_stopped_rank_costs_its_machine(job: Hung) -> None:
    victim = machine_of(job, 5)
    stopped = job.freeze(5)
    job.trains_on()
    answer = job.answer()
    assert answer.verdict.result is LookResult.MACHINES
    assert answer.verdict.ranks == (5,)
    assert answer.machines == {victim}
    assert not alive(stopped)


def test_a_controller_that_dies_while_stacks_are_taken_names_the_machine_all_the_same(
    job: Hung,
) -> None:
    """The rank is in a read that nobody will answer: alive, not stopped, and useless."""
    victim, terms, looks = machine_of(job, 6), len(job.events(ControllerStarted)), job.looks()
    reading = process_of(job, 6)
    job.ask(Trouble.FIFO, 6)
    wait_for("an order to take stacks", lambda: job.looks() > looks)
    job.kill_controller()
    job.trains_on()
    answer = job.answer()
    assert len(job.events(ControllerStarted)) == terms + 1
    assert answer.verdict.result is LookResult.MACHINES
    assert answer.verdict.ranks == (6,)
    assert answer.machines == {victim}
    assert not alive(reading)


def test_a_deadlock_of_two_locks_is_the_codes_and_no_machine_goes(job: Hung) -> None:
    job.ask(Trouble.LOCK, 3)
    job.trains_on()
    answer = job.answer()
    assert answer.verdict.result is LookResult.CODE
    assert answer.verdict.ranks == (3,)
    assert answer.machines == set()


def test_a_stopped_worker_of_a_data_loader_costs_the_machine_of_its_rank(job: Hung) -> None:
    victim = machine_of(job, 2)
    stopped = job.freeze_loader(2)
    job.trains_on()
    answer = job.answer()
    assert answer.verdict.result is LookResult.MACHINES
    assert answer.verdict.ranks == (2,)
    assert answer.machines == {victim}
    assert not alive(stopped)


def test_a_rank_that_leaves_out_a_collective_is_the_codes_fault(job: Hung) -> None:
    job.ask(Trouble.SKIP, 2)
    job.trains_on()
    answer = job.answer()
    assert answer.verdict.result is LookResult.CODE
    assert answer.machines == set()


def test_pauses_that_end_by_themselves_cost_nothing(job: Hung) -> None:
    """All ranks leave out a collective; then an evaluation, a checkpoint, a compilation and a
    silence, each longer than the patience with a step.
    """
    generation = job.generation()
    pause_s = POLICY.stall_min_s + 0.8
    job.ask(Trouble.SKIP, *EVERYBODY)
    job.trains_on()
    for trouble in (Trouble.EVALUATE, Trouble.SAVE, Trouble.COMPILE, Trouble.PAUSE):
        job.ask(trouble, *EVERYBODY, number=pause_s)
        job.trains_on()
    job.nobody_was_stopped()
    assert job.generation() == generation
