"""How long nothing may advance before all stacks are looked at."""

from __future__ import annotations

import math
from typing import Any

import pytest

from everstep.core.ettr import Owner, spent
from everstep.core.look_state import Patience, Watching
from everstep.core.looked import LOOKS_MAX, WHOLE_MAX
from everstep.core.stalls import is_over, stall
from everstep.events import StepProgress
from everstep.looks import Purpose
from everstep.model import MachineId, RankPhase, Seconds, Step
from everstep.sightings import StacksTaken
from tests.transcripts.transcript import Transcript

RUNS = """\
> 0 job stalls nnodes=2 nproc=1 standbys=1
> 1 join m0 m1 m2
> 2 stopped m0 m1
> 3 started m0 m1
"""


class Job(Transcript):
    """A job of two machines whose ranks run."""

    def __init__(self, more: str = "") -> None:
        super().__init__()
        self.run(RUNS + more)

    def step(self, now: Seconds, step: int, **more: Any) -> None:
        generation = self.core.state.generation
        fields = {"step_s": 1.0, "finished_by_one": Step(step), **more}
        done = StepProgress(generation=generation, finished_by_all=Step(step), **fields)
        self.core.handle(done, now)

    @property
    def due_at(self) -> Seconds | None:
        found = stall(self.core.state)
        return None if found is None else found.at


@pytest.mark.parametrize(
    ("step_s", "limit_s"),
    [
        (None, 10.0),  # nothing known of them: at least ten seconds
        (0.2, 10.0),
        (5.0, 15.0),  # three times
        (250.0, 600.0),  # at most ten minutes
        (700.0, 1050.0),  # which would be no patience at all with steps as long as that
    ],
)
def test_patience_is_three_times_a_step_within_bounds(step_s: float | None, limit_s: float) -> None:
    job = Job()
    job.step(1000, 5, step_s=step_s)
    assert job.due_at == 1000 + limit_s


def test_one_slow_step_of_a_hundred_is_not_what_steps_take() -> None:
    job = Job()
    for step in range(99):
        job.step(10 + step, step, step_s=40.0 if step == 50 else 1.0)
    assert job.due_at == 108 + 120.0
    job.step(109, 99)
    assert job.due_at == 109 + 10.0


def test_a_phase_that_ranks_tell_of_gets_three_times_the_longest_of_its_kind() -> None:
    job = Job()
    job.step(10, 5)
    job.step(12, 5, phase=RankPhase.EVALUATING, phase_s=1.0)
    assert job.due_at == 11 + 600.0, "nothing is known of the first one"
    job.step(31, 5, phase=RankPhase.TRAINING, phase_s=0.0)
    assert job.due_at == 31 + 10.0, "its end is a sign of life"
    job.step(40, 6)
    job.step(41, 6, phase=RankPhase.EVALUATING)
    assert job.due_at == 41 + 60.0
    job.step(42, 6, phase=RankPhase.SAVING)
    assert job.due_at == 42 + 600.0, "of another kind, nothing is known"


def test_short_phases_do_not_hide_a_long_one_that_comes_rarely() -> None:
    job = Job()
    job.step(10, 5)
    for at, took_s in enumerate((100.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5)):
        job.step(200 * at + 200, 6 + 2 * at, phase=RankPhase.SAVING)
        job.step(200 * at + 200 + took_s, 7 + 2 * at)
    job.step(2000, 30, phase=RankPhase.SAVING)
    assert job.due_at == 2000 + 300.0


def test_one_odd_step_does_not_raise_the_most_patience_there_is() -> None:
    job = Job()
    for step, step_s in enumerate((1.0, 1.0, 3600.0, 1.0, math.inf, 1.0)):
        job.step(10 + step, step, step_s=step_s)
    assert job.due_at == 15 + 600.0


def test_an_odd_pause_is_forgotten_some_hours_later() -> None:
    job = Job("> 4 progress 0\n> 20 progress 30\n> 30 TimerFired\n> 120 progress 31\n")
    assert job.due_at == 120 + 150.0, "half as long again as it took"
    job.step(7000, 900)
    assert job.due_at == 7000 + 150.0
    job.step(7400, 1000)
    assert job.due_at == 7400 + 10.0
    job = Job("> 3.5 progress -1\n> 50 quiet 20\n> 130 quiet 100\n> 131 quiet 0\n")
    job.run("> 200 quiet 20\n> 201 quiet 0\n> 8000 quiet 20\n")
    assert job.due_at == 7980 + 60.0


def test_a_start_is_measured_by_the_longest_one_before() -> None:
    job = Job("> 3.5 progress -1 attached=yes\n")
    assert job.due_at == 2 + 600.0
    job.step(22, 0)
    job.run("> 23 RankExited m0 rank=0 signal=9\n> 24 stopped m0 m1\n> 25 started m0 m1\n")
    assert job.due_at == 24 + 60.0
    job.step(30, -1, phase=RankPhase.RESTORING, phase_s=2.0)
    assert job.due_at == 28 + 600.0, "and what takes longer says so"


def test_a_start_gets_a_minute_though_the_one_before_was_quick() -> None:
    job = Job("> 4 progress 0\n> 5 RankExited m0 rank=0 signal=9\n> 6 stopped m0 m1\n")
    job.run("> 7 started m0 m1\n")
    assert job.due_at == 6 + 60.0


def test_a_first_step_is_a_start_until_all_have_finished_it() -> None:
    """The others compile yet, say."""
    job = Job()
    job.step(30, -1, finished_by_one=Step(0))
    assert job.due_at == 30 + 600.0
    job.step(31, 0)
    assert job.due_at == 31 + 10.0


def test_a_script_that_never_told_of_steps_is_measured_by_what_it_does() -> None:
    job = Job("> 3.5 progress -1\n")
    assert job.due_at is None
    job.run("> 50 quiet 20\n")
    assert job.due_at == 30 + 60.0
    job.run("> 80 quiet 0\n")
    assert job.due_at is None
    job.run("> 130 quiet 20\n")
    assert job.due_at == 110 + 75.0, "half as long again as it was quiet before"


@pytest.mark.parametrize(
    "more",
    [
        "> 21 RankExited m0 rank=0 code=0\n",
        "> 21 RankExited m0 rank=0 signal=9\n",
        "> 21 StopRequested by=anna\n",
        "> 21 MachineSilent m0\n> 21 MachineSilent m1\n",
    ],
)
def test_ranks_that_end_or_that_nobody_hears_of_do_not_stand_still(more: str) -> None:
    assert Job("> 20 progress 5\n" + more).due_at is None


def test_any_rank_that_finishes_a_step_is_a_sign_of_life() -> None:
    job = Job()
    job.step(10, 5)
    watching = Watching(purpose=Purpose.HANG, since=10.0, noticed_at=20.0, step=Step(5))
    assert not is_over(job.core.state, watching)
    job.step(21, 5, finished_by_one=Step(6))
    assert is_over(job.core.state, watching)
    assert job.due_at == 21 + 10.0


def test_a_state_that_knows_how_long_steps_take_but_learned_nothing_yet_is_patient() -> None:
    job = Job()
    job.step(1000, 5, step_s=60.0)
    job.core.state.patience = Patience()  # as decoded from a snapshot that has none
    assert job.due_at == 1000 + 180.0


def test_patience_starts_anew_when_a_new_controller_hears_of_the_machines() -> None:
    job = Job("> 20 progress 5\n> 25 ControllerStarted term=2 version='0'\n")
    job.run("> 500 join m0 m1 generation=1\n")
    assert job.due_at == 500 + 10.0


NAMED = "looked m0 m1 all_reduce=0 compute/T=1\n"


def test_time_is_lost_from_the_step_that_did_not_come_and_located_from_the_notice_on() -> None:
    job = Job("> 4 progress 0\n> 20 progress 30\n> 30 TimerFired\n")
    assert spent(job.core.state.account, 30)[Owner.DETECTING] == 0, "it may go on by itself"
    job.run(f"> 31 {NAMED}> 31 texts m0 m1\n> 33 TimerFired\n> 34 {NAMED}")
    job.run("> 35 stopped m0 m1 copies=30 finished=30\n")
    seconds = spent(job.core.state.account, 35, incident="incident-1")
    assert seconds[Owner.DETECTING] == pytest.approx(30 - 20.5)
    assert seconds[Owner.LOCATING] == pytest.approx(34 - 30)


def test_a_pause_that_was_over_by_itself_stays_training() -> None:
    job = Job("> 4 progress 0\n> 20 progress 30\n> 30 TimerFired\n> 40 progress 31\n")
    (incident,) = job.core.state.incidents
    assert incident.outcome.startswith("it went on by itself after 20.0 s: step 31 is finished")
    assert not incident.recoveries
    assert not job.core.state.recoveries
    assert set(spent(job.core.state.account, 40, incident="incident-1").values()) == {0.0}


def test_of_many_looks_little_is_kept() -> None:
    job = Job("> 4 progress 0\n")
    for at in range(10, 40):
        job.run(f"> {at} progress {at}\n> {at} StacksRequested by=anna\n")
        job.run(f"> {at} looked m0 m1 all_reduce=0 compute=1\n")
        if at == 10:
            job.run(f"> {at} texts m0 m1\n")
    state = job.core.state
    assert state.looked == 30
    assert [look.number for look in state.looks] == list(range(21, 31))
    assert len(state.looks) == LOOKS_MAX
    whole = [look.number for look in state.looks if look.stacks or look.clusters]
    assert whole == [28, 29, 30]
    assert len(whole) == WHOLE_MAX
    assert not job.core.outstanding(None)
    assert state.watching is None


def test_a_text_that_is_known_does_not_travel_again() -> None:
    job = Job("> 4 progress 0\n> 5 StacksRequested by=anna\n")
    job.run("> 6 looked m0 m1 all_reduce=0 compute=1\n> 6 texts m0 m1\n")
    job.run("> 7 progress 5\n> 8 StacksRequested by=anna\n")
    said = job.run("> 9 looked m0 m1 all_reduce=0-1\n")
    assert "SendStacks" not in said
    assert "JudgeStacks look=2 result=shown" in said


def test_texts_that_nobody_has_any_more_are_done_without() -> None:
    job = Job("> 4 progress 0\n> 5 StacksRequested by=anna\n")
    job.run("> 6 looked m0 m1 all_reduce=0 compute=1\n> 6 texts m0\n")
    assert "JudgeStacks" not in job.run("> 15.9 progress 9\n")
    assert "JudgeStacks look=1 result=shown" in job.run("> 16 TimerFired\n")
    job = Job("> 4 progress 0\n> 5 StacksRequested by=anna\n")
    job.run("> 6 looked m0 m1 all_reduce=0 compute=1\n")
    assert "JudgeStacks look=1 result=shown" in job.run("> 6 texts m0 m1 lost=yes\n")


def test_an_agent_that_comes_right_back_is_not_the_one_that_does_not_answer() -> None:
    job = Job("> 4 progress 0\n> 20 progress 30\n> 29 MachineSilent m1\n> 30 TimerFired\n")
    said = job.run("> 30.1 looked m0 all_reduce=0\n> 30.2 texts m0\n> 33 TimerFired\n")
    assert "JudgeStacks" not in said
    said = job.run("> 33.5 join m1 generation=1\n")
    assert "JudgeStacks look=1 result=again" in said
    job.run("> 45 TimerFired\n> 46 looked m0 m1 all_reduce=0-1\n")
    assert job.core.state.watching is not None
    assert not job.core.state.failures


def test_a_controller_that_hears_of_few_judges_nothing() -> None:
    job = Job("> 4 progress 0\n> 20 progress 30\n> 30 TimerFired\n")
    said = job.run("> 31 MachineSilent m0\n> 31 MachineSilent m1\n> 61 TimerFired\n")
    assert "JudgeStacks" not in said


def test_a_long_step_just_before_a_stall_is_no_time_lost_to_nobody() -> None:
    job = Job("> 4 progress 0\n")
    for at in range(5, 110):
        job.step(at, at)
    job.step(139, 139, step_s=30.0)
    job.run(f"> 149 TimerFired\n> 149 {NAMED}> 149 texts m0 m1\n> 151 TimerFired\n> 152 {NAMED}")
    job.run("> 153 stopped m0 m1 copies=30 finished=30\n")
    seconds = spent(job.core.state.account, 153, incident="incident-1")
    assert seconds[Owner.LOCATING] == pytest.approx(152 - 149)


def test_an_answer_that_is_of_another_look_ends_no_order_of_this_one() -> None:
    job = Job("> 4 progress 0\n> 5 StacksRequested by=anna\n")
    (order,) = job.core.outstanding(MachineId("m0"))
    lie = StacksTaken(
        generation=job.core.state.generation,
        look=0,
        actions=(order.id,),
        machines=(MachineId("m0"),),
    )
    job.core.handle(lie, 6)
    assert job.core.outstanding(MachineId("m0")) == [order]
