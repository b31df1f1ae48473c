"""Numbers of all machines: what is bad becomes a fact at once, and what is normal becomes none."""

from __future__ import annotations

import math

import msgspec
import pytest

from everstep.core.intake import Intake
from everstep.diagnosis.abnormal import Kind
from everstep.events import MetricAbnormal
from everstep.model import Generation, MachineId, Rank, Step
from everstep.sightings import BadNumber, MachineNumbers, Numbers


def said(
    machine: str, *numbers: Numbers, generation: int = 1, bad: tuple[int, int] | None = None
) -> MachineNumbers:
    return MachineNumbers(
        machine=MachineId(machine),
        generation=Generation(generation),
        rank=Rank(0),
        numbers=numbers,
        bad=None if bad is None else BadNumber(rank=Rank(bad[0]), step=Step(bad[1])),
    )


def healthy(first: int, count: int) -> tuple[Numbers, ...]:
    return tuple(
        Numbers(step=Step(step), loss=2.0 + step % 3 / 100, grad_norm=1.0, speed=1000.0 + step % 7)
        for step in range(first, first + count)
    )


def drain(intake: Intake, report: MachineNumbers) -> list[MetricAbnormal]:
    """All facts of one report, as the loop would ask for them."""
    found = [intake.take(report, 0.0)]
    while intake.next_deadline() is not None:
        found.append(intake.next_fact(0.0))
    return [fact for fact in found if isinstance(fact, MetricAbnormal)]


def test_a_bad_loss_of_one_rank_is_a_fact_before_other_machines_spoke() -> None:
    intake = Intake(machines=3)
    (fact,) = drain(intake, said("m1", *healthy(0, 3), bad=(9, 2)))
    assert (fact.kind, fact.machine, fact.rank, fact.first_bad) == (Kind.NOT_FINITE, "m1", 9, 2)


def test_it_is_one_fact_however_many_tell_of_it_until_the_next_generation() -> None:
    intake = Intake(machines=2)
    assert len(drain(intake, said("m0", bad=(0, 7)))) == 1
    assert drain(intake, said("m0", bad=(0, 7))) == []
    assert drain(intake, said("m1", bad=(8, 7))) == []
    assert drain(intake, said("m1", *[Numbers(step=Step(9), loss=math.nan)])) == []
    assert len(drain(intake, said("m1", generation=2, bad=(8, 7)))) == 1


def test_other_bits_of_a_step_done_again_are_one_fact_in_each_generation() -> None:
    intake = Intake(machines=2)
    report = msgspec.structs.replace(
        said("m0", *healthy(0, 3)), differs=BadNumber(rank=Rank(3), step=Step(2))
    )
    (fact,) = drain(intake, report)
    assert (fact.kind, fact.rank, fact.step) == (Kind.DIFFERS, 3, 2)
    assert drain(intake, report) == []


def test_numbers_of_an_older_generation_say_nothing() -> None:
    intake = Intake(machines=1)
    assert drain(intake, said("m0", *healthy(0, 3), generation=2)) == []
    assert drain(intake, said("m0", generation=1, bad=(0, 1))) == []


def test_what_was_normal_outlives_a_generation() -> None:
    intake = Intake(machines=1)
    assert drain(intake, said("m0", *healthy(0, 120))) == []
    again = tuple(Numbers(step=Step(100 + step), loss=20.0) for step in range(6))
    (fact,) = drain(intake, said("m0", *again, generation=2))
    assert (fact.kind, fact.metric, fact.first_bad) == (Kind.JUMP, "loss", 100)


def test_one_machine_at_a_time_is_listened_to() -> None:
    intake = Intake(machines=2)
    assert drain(intake, said("m0", *healthy(0, 120))) == []
    other = tuple(Numbers(step=Step(120 + step), loss=90.0) for step in range(20))
    assert drain(intake, said("m1", *other)) == []


@pytest.mark.parametrize("speed", [400.0, 790.0])
def test_a_decline_is_a_fact_and_a_rise_that_is_no_jump_is_none(speed: float) -> None:
    intake = Intake(machines=1)
    assert drain(intake, said("m0", *healthy(0, 200))) == []
    slow = tuple(
        Numbers(step=Step(200 + step), loss=6.0, grad_norm=1.0, speed=speed) for step in range(30)
    )
    assert [fact.kind for fact in drain(intake, said("m0", *slow))] == [Kind.SLOW]


def test_speed_is_judged_although_nobody_reports_a_loss() -> None:
    intake = Intake(machines=2)
    steps = range(140)
    fast = tuple(Numbers(step=Step(step), speed=10.0) for step in steps[:120])
    slow = tuple(Numbers(step=Step(step), speed=6.0) for step in steps[120:])
    assert drain(intake, said("m1", *fast)) == []
    assert drain(intake, said("m0", *slow)) == [], "one machine is listened to"
    (fact,) = drain(intake, said("m1", *slow))
    assert (fact.kind, fact.machine, fact.first_bad) == (Kind.SLOW, "m1", 120)


def test_who_reports_a_loss_is_listened_to_rather_than_who_was_first() -> None:
    intake = Intake(machines=2)
    assert drain(intake, said("m0", Numbers(step=Step(0), speed=10.0))) == []
    assert drain(intake, said("m1", *healthy(0, 120))) == []
    again = tuple(Numbers(step=Step(120 + step), loss=20.0) for step in range(6))
    (fact,) = drain(intake, said("m1", *again))
    assert fact.kind is Kind.JUMP
