"""The judge of numbers: what it must always say, and what it must never say."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from everstep.diagnosis.abnormal import NUMERIC, Kind, Signal
from everstep.diagnosis.levels import is_ramp
from everstep.diagnosis.sample import Sample
from everstep.diagnosis.signals import Judge

quick = settings(deadline=None, max_examples=30)
positive = st.floats(min_value=1e-6, max_value=1e6)


def judged(samples: Sequence[Sample]) -> list[Signal]:
    judge = Judge()
    return [signal for sample in samples for signal in judge.handle(sample)]


def series(
    count: int, loss: Callable[[int], float | None], *, seed: int = 1, noise: float = 0.01
) -> list[Sample]:
    """Healthy but for the loss: gradient norm and speed with a little noise."""
    chance = random.Random(seed)
    samples = []
    for step in range(count):
        value = loss(step)
        samples.append(
            Sample(
                step=step,
                loss=None if value is None else value * chance.gauss(1, noise),
                grad_norm=abs(chance.gauss(1, 0.1)),
                tokens_per_s=chance.gauss(1000, 10),
            )
        )
    return samples


def kinds(samples: Sequence[Sample]) -> list[Kind]:
    return [signal.kind for signal in judged(samples)]


@quick
@given(positive, positive, positive)
def test_a_constant_series_never_signals(loss: float, norm: float, speed: float) -> None:
    constant = [
        Sample(step=step, loss=loss, grad_norm=norm, tokens_per_s=speed) for step in range(300)
    ]
    assert judged(constant) == []


@quick
@given(st.integers(0, 299), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_a_value_that_is_not_finite_signals_at_once(at: int, value: float) -> None:
    samples = series(300, lambda _: 2.0)
    samples[at] = replace(samples[at], loss=value)
    first = judged(samples[: at + 1])
    assert [signal.kind for signal in first] == [Kind.NOT_FINITE]
    assert (first[0].step, first[0].first_bad) == (at, at)


@quick
@given(st.integers(51, 250))
def test_one_value_that_is_not_finite_recovers(at: int) -> None:
    samples = series(300, lambda _: 2.0)
    samples[at] = replace(samples[at], loss=math.nan, grad_norm=math.nan)
    assert kinds(samples) == [Kind.NOT_FINITE, Kind.RECOVERED]


@quick
@given(st.floats(min_value=1e-3, max_value=1e3), st.integers(0, 5))
def test_the_scale_of_a_metric_does_not_matter(factor: float, seed: int) -> None:
    samples = series(300, lambda step: 2.0 if step < 200 else 30.0, seed=seed)
    scaled = [
        replace(
            sample,
            loss=(sample.loss or 0.0) * factor,
            grad_norm=(sample.grad_norm or 0.0) * factor,
            tokens_per_s=(sample.tokens_per_s or 0.0) * factor,
        )
        for sample in samples
    ]
    said = [(signal.kind, signal.metric, signal.step) for signal in judged(samples)]
    assert said == [(signal.kind, signal.metric, signal.step) for signal in judged(scaled)]
    assert (Kind.JUMP, "loss") in {(kind, metric) for kind, metric, _ in said}


@quick
@given(st.lists(st.one_of(st.none(), st.floats()), max_size=200), st.randoms())
def test_no_series_whatever_breaks_the_judge(
    values: list[float | None], chance: random.Random
) -> None:
    samples = [
        Sample(
            step=2 * step,
            loss=value,
            grad_norm=chance.choice([value, None, 1.0]),
            step_s=value,
            loss_scale=value,
            skipped=chance.choice([0, 0, 1]),
        )
        for step, value in enumerate(values)
    ]
    for signal in judged(samples):
        assert signal.first_bad <= signal.step


def test_a_gradient_norm_that_alone_is_not_finite_once_may_be_a_scalers_search() -> None:
    samples = series(200, lambda _: 2.0)
    samples[120] = replace(samples[120], grad_norm=math.inf)
    assert judged(samples) == []
    for at in range(120, 123):
        samples[at] = replace(samples[at], grad_norm=math.inf)
    first = judged(samples)[0]
    assert (first.kind, first.first_bad, first.step) == (Kind.NOT_FINITE, 120, 122)


def test_the_first_step_of_a_jump_is_named() -> None:
    jump = next(
        s for s in judged(series(200, lambda s: 2.0 if s < 120 else 20.0)) if s.kind is Kind.JUMP
    )
    assert (jump.metric, jump.first_bad) == ("loss", 120)
    assert jump.step < 125


def test_two_steps_five_times_as_high_are_a_spike_and_no_divergence() -> None:
    samples = series(200, lambda step: 25.0 if step in {120, 121} else 2.0)
    assert NUMERIC.isdisjoint(kinds(samples))
    assert [s.of for s in judged(samples) if s.kind is Kind.RECOVERED] == [Kind.JUMP]


def test_the_first_fifty_steps_are_not_compared() -> None:
    assert kinds(series(50, lambda step: 2.0 if step < 30 else 40.0)) == []


def test_a_gradient_norm_that_is_always_zero_is_no_evidence() -> None:
    samples = [
        replace(sample, grad_norm=0.0) for sample in series(200, lambda s: 2.0 if s < 120 else 7.0)
    ]
    assert {signal.metric for signal in judged(samples)} == {"loss"}


def test_a_loss_that_is_not_printed_any_more_is_missed_in_the_third_report() -> None:
    (signal,) = judged(series(110, lambda step: 2.0 if step < 100 else None))
    assert (signal.kind, signal.first_bad, signal.step) == (Kind.MISSING, 100, 102)


def test_a_loss_that_is_zero_all_at_once_is_missed_too() -> None:
    (signal,) = judged(series(110, lambda step: 2.0 if step < 100 else 0.0))
    assert (signal.kind, signal.first_bad) == (Kind.MISSING, 100)


def test_a_loss_that_falls_to_zero_by_and_by_is_not_missed() -> None:
    assert kinds(series(400, lambda step: 2.0 * 0.9**step if step < 300 else 0.0)) == []


def test_updates_that_the_scaler_leaves_out_at_the_start_are_its_search() -> None:
    start = [
        Sample(step=step, grad_norm=math.inf, loss_scale=2.0 ** (32 - step), skipped=1)
        for step in range(17)
    ]
    rest = [replace(s, step=s.step + 17, loss_scale=32768.0) for s in series(100, lambda _: 2.0)]
    assert judged(start + rest) == []


@pytest.mark.parametrize("lowest", [1.0, 0.5])
def test_a_scaler_at_its_minimum_is_no_search(lowest: float) -> None:
    samples = [
        Sample(step=step, loss_scale=max(lowest, 2.0 ** (12 - step)), skipped=1)
        for step in range(15)
    ]
    assert kinds(samples)[:1] == [Kind.SCALE]


def test_more_than_twenty_left_out_in_a_row_are_no_search() -> None:
    (signal,) = judged([Sample(step=step, loss_scale=2.0**40, skipped=1) for step in range(30)])
    assert (signal.kind, signal.step, signal.first_bad) == (Kind.SCALE, 20, 0)


def _paced(speed: Callable[[int], float], count: int = 400) -> list[Signal]:
    chance = random.Random(3)
    return judged([Sample(step=s, mfu=speed(s) * chance.gauss(1, 0.01)) for s in range(count)])


def test_ten_slow_steps_in_a_row_are_a_decline() -> None:
    (signal,) = _paced(lambda step: 0.4 if step < 200 else 0.28)
    assert (signal.kind, signal.first_bad, signal.step) == (Kind.SLOW, 200, 209)


def test_nine_slow_steps_in_a_row_are_none() -> None:
    assert _paced(lambda step: 0.2 if 200 <= step < 209 else 0.4) == []


def test_every_tenth_step_may_be_slow() -> None:
    assert _paced(lambda step: 0.05 if step % 10 == 0 else 0.4) == []


def test_speed_that_comes_back_is_told() -> None:
    said = _paced(lambda step: 0.2 if 200 <= step < 260 else 0.4)
    assert [signal.kind for signal in said] == [Kind.SLOW, Kind.RECOVERED]


def test_a_ramp_is_told_from_a_step() -> None:
    said = _paced(lambda step: 0.4 / (1 + step / 60))
    assert [signal.kind for signal in said] == [Kind.RAMP]
    assert is_ramp([100 - i for i in range(60)], 0.8)
    assert not is_ramp([100.0] * 30 + [60.0] * 30, 0.8)


def test_steps_that_are_counted_anew_or_done_again_are_no_signal() -> None:
    first, again = series(200, lambda _: 2.0), series(100, lambda _: 2.0, seed=2)
    assert judged(first + [replace(s, step=s.step + 150) for s in again]) == []
    assert (
        judged([replace(s, epoch=float(i // 100), step=i % 100) for i, s in enumerate(first)]) == []
    )


def test_slow_first_steps_after_a_restart_are_no_decline() -> None:
    chance = random.Random(5)
    samples = [
        Sample(step=step, attempt=attempt, step_s=20.0 if i < 4 else chance.gauss(1, 0.01))
        for attempt, start in enumerate((0, 150, 300))
        for i, step in enumerate(range(start, start + 160))
    ]
    assert judged(samples) == []
