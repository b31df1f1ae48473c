"""A small loss of speed that lasts is told, and what only looks like one is not."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from everstep.core.numbers import NumbersJudge
from everstep.diagnosis.abnormal import Kind, Signal
from everstep.diagnosis.sample import Sample
from everstep.diagnosis.signals import Judge
from everstep.events import MetricAbnormal
from everstep.model import Generation, MachineId, Rank, Step
from everstep.sightings import MachineNumbers, Numbers

Speed = Callable[[int], float]


def judged(count: int, speed: Speed, judge: Judge | None = None, first: int = 0) -> list[Signal]:
    judge = judge or Judge()
    return [
        signal
        for step in range(first, first + count)
        for signal in judge.handle(Sample(step=step, tokens_per_s=speed(step)))
    ]


def noisy(seed: int, jitter: float, level: Speed = lambda _: 1000.0) -> Speed:
    chance = random.Random(seed)
    return lambda step: level(step) / chance.lognormvariate(0, jitter)


@pytest.mark.parametrize("jitter", [0.0, 0.01, 0.02])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_loss_of_five_percent_is_told_once_and_when_it_is_over(jitter: float, seed: int) -> None:
    speed = noisy(seed, jitter, lambda step: 950.0 if 1000 <= step < 1800 else 1000.0)
    sag, over = judged(3000, speed)
    assert (sag.kind, over.kind, over.of) == (Kind.SAG, Kind.RECOVERED, Kind.SAG)
    assert 950 <= sag.first_bad <= 1100
    assert 1150 <= sag.step <= 1300
    assert 1800 <= over.step <= 1900
    assert "95." in sag.why or "94." in sag.why


@pytest.mark.parametrize("seed", range(4))
def test_an_hour_of_jitter_is_no_sag(seed: int) -> None:
    assert judged(3600, noisy(seed, 0.1)) == []


@pytest.mark.parametrize("size", [0.0003, 0.001, 0.003])
def test_speed_that_wanders_is_no_sag(size: float) -> None:
    for seed in range(4):
        chance, at = random.Random(seed), [1000.0]

        def wander(_: int, at: list[float] = at, chance: random.Random = chance) -> float:
            at[0] *= chance.lognormvariate(0, size)
            return at[0]

        assert not [s for s in judged(3600, wander) if s.kind is Kind.SAG]


def test_evaluations_pauses_and_steps_of_two_lengths_are_no_sag() -> None:
    assert judged(3600, noisy(1, 0.02, lambda step: 200.0 if step % 100 == 99 else 1000.0)) == []
    chance = random.Random(2)
    mixed = judged(3600, lambda _: 1000.0 if chance.random() < 0.5 else 900.0)
    assert [signal for signal in mixed if signal.kind is Kind.SAG] == []


def test_three_percent_is_too_little() -> None:
    assert judged(3000, noisy(1, 0.005, lambda step: 1000.0 if step < 1500 else 972.0)) == []


def test_a_great_loss_is_told_as_such_alone() -> None:
    found = judged(3000, noisy(1, 0.01, lambda step: 1000.0 if step < 1500 else 700.0))
    assert [signal.kind for signal in found] == [Kind.SLOW]


def test_other_machines_after_a_restart_have_a_speed_of_their_own() -> None:
    judge = Judge()
    assert judged(1500, lambda _: 1000.0, judge) == []
    judge.restart()
    assert judged(1500, lambda _: 950.0, judge, first=1500) == []


def test_the_core_is_told_of_it() -> None:
    judge = NumbersJudge()
    told: list[MetricAbnormal] = []
    for step in range(1500):
        numbers = Numbers(step=Step(step), loss=1.0, speed=1000.0 if step < 1000 else 950.0)
        report = MachineNumbers(
            machine=MachineId("m0"), generation=Generation(1), rank=Rank(0), numbers=(numbers,)
        )
        told += judge.take(report)
    assert [each.kind for each in told] == ["sag"]
