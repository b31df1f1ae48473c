"""The second path to silent machines: what the transcripts do not tell."""

from __future__ import annotations

import pytest

from everstep.actions import ControllerAction, EvictMachine, ProbeMachine
from everstep.core.probing import ANY_PORT
from everstep.events import (
    ControllerStarted,
    MachineProbed,
    MachineSilent,
    StepProgress,
    TimerFired,
)
from everstep.model import Generation, MachineId, Seconds, Step, Term
from tests.transcripts.transcript import Transcript


class Job:
    """Machines that train, until one of them falls silent."""

    def __init__(self, nnodes: int = 3, standbys: int = 1, join: str = "shard_port=7000") -> None:
        names = " ".join(f"m{n}" for n in range(nnodes + standbys))
        members = " ".join(f"m{n}" for n in range(nnodes))
        transcript = Transcript()
        transcript.run(f"> 0 job nnodes={nnodes} nproc=1 standbys={standbys} disk_every=0\n")
        transcript.run(f"> 1 join {names} {join}\n> 2 stopped {members}\n> 3 started {members}\n")
        self.core = transcript.core

    def progress(
        self, now: Seconds, step: int, one: int | None = None, step_s: float = 0.5
    ) -> None:
        fact = StepProgress(
            generation=Generation(1),
            finished_by_all=Step(step),
            finished_by_one=Step(step if one is None else one),
            step_s=step_s,
        )
        self.core.handle(fact, now)

    def silent(self, now: Seconds, *names: str) -> None:
        for name in names:
            fact = MachineSilent(machine=MachineId(name), agent=f"agent-{name}")
            self.core.handle(fact, now)

    def at_deadline(self) -> tuple[Seconds, list[ProbeMachine]]:
        """What is asked at the next moment that the core names."""
        now = self.core.next_deadline()
        assert now is not None
        return now, probes(self.core.handle(TimerFired(), now))

    def answer(
        self, now: Seconds, asked: list[ProbeMachine], *said: bool | None
    ) -> list[ControllerAction]:
        actions: list[ControllerAction] = []
        for order, reachable in zip(asked, said, strict=False):
            fact = MachineProbed(
                machine=order.machine,
                action=order.id,
                target=order.target,
                reachable=reachable,
            )
            actions += self.core.handle(fact, now)
        return actions


def probes(actions: list[ControllerAction]) -> list[ProbeMachine]:
    return [action for action in actions if isinstance(action, ProbeMachine)]


def evicted(actions: list[ControllerAction]) -> list[MachineId]:
    return [action.machine for action in actions if isinstance(action, EvictMachine)]


def test_long_steps_are_waited_for() -> None:
    job = Job()
    job.progress(10.0, 5, step_s=20.0)
    job.silent(11.0, "m1")
    now, asked = job.at_deadline()
    assert (now, len(asked)) == (70.0, 2)


def test_nobody_is_asked_before_a_step_was_told_of() -> None:
    """A first step may take minutes: that nothing advances says nothing then."""
    job = Job()
    job.silent(11.0, "m1")
    now, asked = job.at_deadline()
    assert (now, asked) == (71.0, [])


def test_while_others_advance_nobody_is_asked_nor_lost() -> None:
    """The silent machine's own steps are not told, so what all have finished cannot grow."""
    job = Job()
    job.progress(10.0, 5)
    job.silent(11.0, "m1")
    for second in range(12, 200):
        job.progress(float(second), 5, one=second)
    assert not job.core.state.probes
    assert not job.core.state.machines[MachineId("m1")].evicted


@pytest.mark.parametrize("said", [(True,), (None,), (False, True), (False, None)])
def test_one_answer_that_is_not_no_ends_the_attempt(said: tuple[bool | None, ...]) -> None:
    job = Job()
    job.progress(10.0, 5)
    job.silent(11.0, "m1")
    now, asked = job.at_deadline()
    assert evicted(job.answer(now + 1, asked, *said)) == []
    later, again = job.at_deadline()
    assert (later, [p.attempt for p in again]) == (now + 5, [2, 2])
    again = probes(job.answer(later + 1, again, False, False))
    assert [p.attempt for p in again] == [3, 3]
    assert evicted(job.answer(later + 2, again, False, False)) == ["m1"]


def test_an_answer_that_does_not_come_is_given_up() -> None:
    job = Job()
    job.progress(10.0, 5)
    job.silent(11.0, "m1")
    now, asked = job.at_deadline()
    job.answer(now + 1, asked[:1], False)
    later, again = job.at_deadline()
    assert later == now + 5
    assert evicted(job.answer(later + 1, asked[1:], False)) == [], "too late to count"
    third = probes(job.answer(later + 1, again, False, False))
    assert evicted(job.answer(later + 2, third, False, False)) == ["m1"]


def test_of_two_machines_the_other_one_is_asked() -> None:
    job = Job(nnodes=2, standbys=0)
    job.progress(10.0, 5)
    job.silent(11.0, "m1")
    now, asked = job.at_deadline()
    assert [order.machine for order in asked] == ["m0"]
    again = probes(job.answer(now + 1, asked, False))
    assert evicted(job.answer(now + 2, again, False)) == ["m1"]


def test_a_job_of_one_machine_asks_its_standbys() -> None:
    job = Job(nnodes=1, standbys=2)
    job.progress(10.0, 5)
    job.silent(11.0, "m0")
    now, asked = job.at_deadline()
    assert (now, asked) == (71.0, []), "all of the job is silent: it may train on"


def test_verdicts_are_void_when_most_of_the_job_falls_silent_meanwhile() -> None:
    job = Job(nnodes=4, standbys=0)
    job.progress(10.0, 5)
    job.silent(11.0, "m1")
    now, asked = job.at_deadline()
    again = probes(job.answer(now + 1, asked, False, False))
    job.silent(now + 2, "m2", "m3")
    assert evicted(job.answer(now + 3, again, False, False)) == []


def test_a_new_controller_asks_anew() -> None:
    job = Job()
    job.progress(10.0, 5)
    job.silent(11.0, "m1")
    now, asked = job.at_deadline()
    job.core.handle(ControllerStarted(term=Term(2), version="0"), now + 1)
    assert not probes(job.core.outstanding(MachineId("m0")))
    assert job.answer(now + 2, asked, False, False) == []
    assert not job.core.state.probes


@pytest.mark.parametrize(("join", "port"), [("shard_port=7000", 7000), ("", 29500)])
def test_any_port_does(join: str, port: int) -> None:
    job = Job(join=join)
    job.progress(10.0, 5)
    job.silent(11.0, "m1")
    _, asked = job.at_deadline()
    assert {(order.address, order.port) for order in asked} == {("addr-m1", port)}
    assert ANY_PORT < 1024


def test_those_who_are_asked_are_spread() -> None:
    """A whole switch is silent: not all of it is the business of the same two neighbours."""
    job = Job(nnodes=12, standbys=0)
    job.progress(10.0, 5)
    job.silent(11.0, "m8", "m9", "m10", "m11")
    _, asked = job.at_deadline()
    assert len({order.machine for order in asked}) == 8
    assert all(order.machine != order.target for order in asked)
