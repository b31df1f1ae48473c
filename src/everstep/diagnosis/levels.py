"""The recent past of one metric, and whether its newest values still belong to it.

Used by signals.py, one for loss, one for the gradient norm and one for speed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise

from everstep.diagnosis.abnormal import Kind, Limits, Signal
from everstep.diagnosis.sample import Sample

UNSTEADY = 0.06
"""Speed that differs by this share from one sample to the next: few samples prove nothing."""
BLOCKS = 6
"""Parts of a series whose medians must all fall for a ramp."""


class Level:
    """One metric's recent past, and how far the newest values are from it."""

    def __init__(self, name: str, limits: Limits, *, rises: bool) -> None:
        self.name = name
        self._limits = limits
        self._rises = rises
        self._past: deque[float] = deque(maxlen=limits.window)
        self._recent: deque[tuple[int, float]] = deque(maxlen=limits.recent)
        self._away: Kind | None = None
        self._since = 0
        self._high = 0
        self._normal = 0.0
        self._worst = 0.0

    @property
    def positive(self) -> bool:
        """Whether the recent past was above 0, and not on its way there."""
        past = self._past
        return len(past) >= self._limits.recent and past[-1] > 0.3 * _median(past) > 0

    def restart(self) -> None:
        """Nothing is away from its past any more: it is computed again."""
        self._away = None
        self._high = 0
        self._recent.clear()

    def take(self, sample: Sample, value: float, *, compared: bool) -> Signal | None:
        """A finite value; `compared` is False while training still settles."""
        self._recent.append((sample.step, value))
        if self._away is not None:
            return self._follow(sample, value)
        normal = _median(self._past)
        ready = compared and len(self._past) >= self._limits.base and normal > 0
        if ready and min(self._past) > 0 and value >= self._limits.back * normal:
            return self._high_value(sample, value, normal)
        spike = self._come_back(sample) if self._high else None
        self._past.append(value)
        if ready and self._rises and spike is None:
            return self._rise(sample, normal)
        return spike

    def _high_value(self, sample: Sample, value: float, normal: float) -> Signal | None:
        """Twice the median or more: kept out of the past until it is known what it is."""
        if not self._high:
            self._since, self._normal, self._worst = sample.step, normal, value
        self._high += 1
        self._worst = max(self._worst, value)
        mean = sum(v for _, v in self._recent) / len(self._recent)
        lasting = self._high >= min(3, self._limits.recent)
        if lasting and mean >= self._limits.jump * normal:
            self._away = Kind.JUMP
            return self._signal(Kind.JUMP, sample, value)
        if self._high < self._limits.window:
            return None if not self._rises else self._rise(sample, normal)
        self._settle_there()
        return None

    def _settle_there(self) -> None:
        """So long at a higher level without a jump: that is the level now."""
        self._high = 0
        self._past.clear()

    def _come_back(self, sample: Sample) -> Signal | None:
        lasted, self._high = self._high, 0
        if self._worst < self._limits.jump * self._normal:
            return None
        return self._recovered(Kind.JUMP, sample, lasted)

    def _rise(self, sample: Sample, normal: float) -> Signal | None:
        """Every recent value is up, and far outside the noise."""
        if len(self._recent) < self._limits.recent:
            return None
        spread = spread_of(self._past, normal)
        bound = max(self._limits.rise * normal, normal + self._limits.noise * spread)
        low = min(v for _, v in self._recent)
        if low < bound:
            return None
        self._away, self._since, self._normal = Kind.RISE, self._recent[0][0], normal
        self._worst = max(v for _, v in self._recent)
        self._high = len(self._recent)
        return self._signal(Kind.RISE, sample, self._recent[-1][1])

    def _follow(self, sample: Sample, value: float) -> Signal | None:
        away = self._away
        assert away is not None
        self._high += 1
        self._worst = max(self._worst, value)
        limits = self._limits
        back = limits.back if away is Kind.JUMP else (1 + limits.rise) / 2
        if value < back * self._normal:
            lasted, self._away, self._high = self._high - 1, None, 0
            self._past.append(value)
            return self._recovered(away, sample, lasted)
        mean = sum(v for _, v in self._recent) / len(self._recent)
        if away is Kind.RISE and mean >= limits.jump * self._normal:
            self._away = Kind.JUMP
            return self._signal(Kind.JUMP, sample, value)
        return None

    def _signal(self, kind: Kind, sample: Sample, value: float) -> Signal:
        return Signal(
            kind=kind,
            metric=self.name,
            step=sample.step,
            first_bad=self._since,
            value=value,
            normal=self._normal,
            why=f"{self.name} is {value:.4g} at step {sample.step},"
            f" {value / self._normal:.1f} times its median of {self._normal:.4g},"
            f" since step {self._since}",
            at=sample.at,
            line=sample.line,
        )

    def _recovered(self, of: Kind, sample: Sample, lasted: int) -> Signal:
        return Signal(
            kind=Kind.RECOVERED,
            metric=self.name,
            of=of,
            step=sample.step,
            first_bad=self._since,
            value=self._worst,
            normal=self._normal,
            lasted=lasted,
            why=f"{self.name} rose to {self._worst:.4g} from {self._normal:.4g} at step"
            f" {self._since} and was back at step {sample.step}",
            at=sample.at,
            line=sample.line,
        )


class Pace:
    """Speed: its recent past, slow steps in a row, and whether it falls bit by bit."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._past: deque[float] = deque(maxlen=limits.window)
        self._slow = 0
        self._since = 0
        self._normal = 0.0
        self._away: Kind | None = None
        self._block: list[float] = []
        self._blocks: deque[tuple[int, float]] = deque(maxlen=2 * BLOCKS)

    @property
    def away(self) -> bool:
        """Whether it fell, and is not back."""
        return self._away is not None

    def take(self, sample: Sample, speed: float, stride: int) -> Signal | None:
        if self._away is not None:
            return self._follow(sample, speed)
        normal = _median(self._past)
        ready = len(self._past) >= self._limits.base
        self._past.append(speed)
        if self._creeps(sample, speed):
            self._away = Kind.RAMP
            self._since, self._normal = self._blocks[0]
            return self._signal(Kind.RAMP, sample, speed)
        if not ready or speed >= self._limits.slow * normal:
            self._slow = 0
            return None
        if not self._slow:
            self._since, self._normal = sample.step, normal
        self._slow += 1
        needed = max(self._limits.slow_samples, math.ceil(self._limits.slow_steps / stride))
        if spread_of(self._past, normal) > UNSTEADY * normal:
            needed = self._limits.slow_steps
        if self._slow < needed:
            return None
        self._away = Kind.RAMP if is_ramp(list(self._past), self._limits.ramp) else Kind.SLOW
        return self._signal(self._away, sample, speed)

    def _creeps(self, sample: Sample, speed: float) -> bool:
        """Too slowly for a comparison with the last 50 values: medians of longer parts fall."""
        self._block.append(speed)
        if len(self._block) < self._limits.window // 2:
            return False
        self._blocks.append((sample.step, _median(self._block)))
        self._block.clear()
        medians = [median for _, median in self._blocks]
        return len(medians) >= BLOCKS and is_ramp(medians, self._limits.ramp)

    def restart(self) -> None:
        """A new attempt: the past stays, a ramp begins anew."""
        self._slow = 0
        self._block.clear()
        self._blocks.clear()
        if self._away is Kind.RAMP:
            self._away = None
            self._past.clear()

    def _follow(self, sample: Sample, speed: float) -> Signal | None:
        self._slow += 1
        self._block.clear()
        self._blocks.clear()
        if speed >= (1 + self._limits.slow) / 2 * self._normal:
            of, self._away = self._away, None
            lasted, self._slow = self._slow, 0
            self._past.clear()
            return Signal(
                kind=Kind.RECOVERED,
                metric="speed",
                of=of,
                step=sample.step,
                first_bad=self._since,
                value=speed,
                normal=self._normal,
                lasted=lasted,
                why=f"speed was back at {speed / self._normal:.0%} of its median at step"
                f" {sample.step}, after it fell at step {self._since}",
                at=sample.at,
                line=sample.line,
            )
        return None

    def _signal(self, kind: Kind, sample: Sample, speed: float) -> Signal:
        how = "falls bit by bit, it is" if kind is Kind.RAMP else "is"
        return Signal(
            kind=kind,
            metric="speed",
            step=sample.step,
            first_bad=self._since,
            value=speed,
            normal=self._normal,
            why=f"speed {how} {speed / self._normal:.0%} of its median at step {sample.step}, below"
            f" {self._limits.slow:.0%} since step {self._since}",
            at=sample.at,
            line=sample.line,
        )


def is_ramp(speeds: Sequence[float], to: float) -> bool:
    """Whether speed falls bit by bit, in the main: no one fall makes half of it, none goes up."""
    parts = blocks(speeds, BLOCKS)
    if len(parts) < 4 or parts[-1] > to * parts[0]:
        return False
    falls = [before - after for before, after in pairwise(parts)]
    whole = parts[0] - parts[-1]
    if whole < 5 * noise_of(speeds) / math.sqrt(len(speeds) / len(parts)):
        return False
    return min(falls) > -0.05 * whole and max(falls) < 0.55 * whole


def noise_of(values: Sequence[float]) -> float:
    """Standard deviation of one value to the next, which a trend or a fall does not widen."""
    steps = [abs(after - before) for before, after in pairwise(values)]
    return 1.4826 * _median(steps) / math.sqrt(2)


def blocks(values: Sequence[float], count: int) -> list[float]:
    """Medians of `count` parts of equal length."""
    size = len(values) / count
    if size < 1:
        return list(values)
    cut = [values[int(i * size) : int((i + 1) * size)] for i in range(count)]
    return [_median(part) for part in cut]


def _median(values: Iterable[float]) -> float:
    """0 of nothing."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def spread_of(values: Iterable[float], middle: float) -> float:
    """Standard deviation of noise with this median absolute deviation."""
    return 1.4826 * _median(abs(value - middle) for value in values)
