"""Judges training's numbers as they come: what is abnormal in loss, gradient norm and speed.

One Judge per stream of samples, with bounded memory. core/numbers.py asks it while a job runs, with
the default limits; series.py asks it about the logs of a job that is over. Thresholds are ratios,
so no unit and no scale matters; a metric that never changes is no evidence.

The rules are those of ByteRobust (section 4: NaN at once, loss or gradient norm five times its
recent past, low utilization), with what its text leaves open as a field of Limits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import pairwise

from everstep.diagnosis.progress import Sample
from everstep.model import Seconds, Value

BLOCKS = 6
"""Parts of a series whose medians must all fall for a ramp."""


class Limits(Value, frozen=True, kw_only=True):
    """What counts as abnormal. Counts are samples: one a step, or one per logged interval."""

    skip_steps: int = 50
    """Steps at the start of a job that are not compared: loss and speed still settle."""
    window: int = 50
    """Of how many values the median is the recent past."""
    base: int = 20
    """Fewer values than this are no past to compare with."""
    recent: int = 5
    """The mean of so many newest values is compared."""
    jump: float = 5.0
    """Times the median: loss or gradient norm went away."""
    rise: float = 1.5
    """Times the median, and far outside the noise: the loss alone, worth telling."""
    back: float = 2.0
    """Times the median: below it (below half the way for a rise) the value has come back."""
    slow: float = 0.8
    """Times the median speed: below it a step is slow."""
    slow_steps: int = 10
    """So many steps in a row make a decline."""
    slow_samples: int = 3
    """At least so many samples, however many steps each covers."""
    settle: int = 5
    """Samples after a restart whose speed says nothing: compilation, cold caches."""
    missing: int = 3
    """So many samples in a row without a loss that was always there before."""
    skips: int = 20
    """More updates in a row that the loss scaler leaves out are no search any more."""
    ramp: float = 0.8
    """Speed that falls to this share of what it was, bit by bit, is a ramp."""
    noise: float = 12.0
    """Standard deviations (from the median absolute deviation) that a rise must stand out."""


class Kind(StrEnum):
    """What a signal says."""

    NOT_FINITE = "not_finite"
    """Loss or gradient norm is NaN or infinite, and no loss scaler left the step out."""
    MISSING = "missing"
    """The loss is not printed any more, or is exactly 0: trainers do so with what is not finite."""
    JUMP = "jump"
    """Five times the recent past, and it lasts."""
    RISE = "rise"
    """The loss went up far beyond its noise, by less than JUMP."""
    SCALE = "scale"
    """The loss scaler leaves out too many steps, or cannot go lower."""
    SLOW = "slow"
    """Speed fell from one level to a lower one."""
    RAMP = "ramp"
    """Speed falls bit by bit."""
    RECOVERED = "recovered"
    """What `of` said is over."""


NUMERIC = frozenset({Kind.NOT_FINITE, Kind.MISSING, Kind.JUMP, Kind.SCALE})
"""Kinds that make every later step worthless until somebody acts."""


class Signal(Value, frozen=True, kw_only=True):
    """One thing that changed for the worse, or back."""

    kind: Kind
    metric: str
    step: int
    """When it was certain."""
    first_bad: int
    """The first step that shows it: what was saved before it is good."""
    value: float | None = None
    normal: float | None = None
    """Median of the recent past."""
    why: str
    """One clause with its numbers, for people."""
    of: Kind | None = None
    """Of a RECOVERED signal, what is over."""
    lasted: int = 0
    """Samples."""
    at: Seconds | None = None
    line: int = 0


class _Level:
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
        spread = _spread(self._past, normal)
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


class _Pace:
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


class Judge:
    """One stream of samples in the order of training. handle() says what changed."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._levels = {
            "loss": _Level("loss", self._limits, rises=True),
            "grad_norm": _Level("grad_norm", self._limits, rises=False),
        }
        self._pace = _Pace(self._limits)
        self._first: int | None = None
        self._last: Sample | None = None
        self._stride = 1
        self._settling = self._limits.settle
        self._bad: Signal | None = None
        self._bad_for = 0
        self._with_loss: dict[str, int] = {}
        self._without = 0
        self._without_since: Sample | None = None
        self._missed = False
        self._skips = 0
        self._told_scale = False
        self._highest_scale = 0.0
        self._lr_moves = 0

    def handle(self, sample: Sample) -> list[Signal]:
        """What this sample changes; mostly nothing."""
        if self._first is None:
            self._first = sample.step
        found: list[Signal] = []
        self._note_restart(sample)
        compared = sample.step - self._first >= self._limits.skip_steps
        left_out = self._left_out(sample)
        found += self._scaler(sample)
        found += self._finite(sample, left_out=left_out)
        found += self._present(sample, left_out=left_out)
        for name, level in self._levels.items():
            value = getattr(sample, name)
            if name == "loss" and self._gone(sample):
                continue
            if value is not None and math.isfinite(value) and not left_out:
                signal = level.take(sample, value, compared=compared)
                found += [signal] if signal is not None else []
        speed = self._speed(sample)
        if speed is not None:
            self._settling -= 1
            if self._settling < 0 and compared:
                signal = self._pace.take(sample, speed, self._stride)
                found += [signal] if signal is not None else []
        if sample.form not in ("overflow", "deepspeed", "speed"):
            self._last = sample
        return found

    def _note_restart(self, sample: Sample) -> None:
        last = self._last
        if last is None:
            return
        other = sample.attempt is not None and sample.attempt != last.attempt
        back = sample.step < last.step - 2 * self._stride and not _next_epoch(last, sample)
        if other or back:
            self._settling = self._limits.settle
            self._pace.restart()
        elif 0 < sample.step - last.step < 10_000:
            self._stride = sample.step - last.step

    def _speed(self, sample: Sample) -> float | None:
        """As the trainer says it, else steps over the time between two stamps."""
        if sample.form == "overflow" or sample.speed is not None:
            return sample.speed
        last = self._last
        if last is None or last.at is None or sample.at is None or sample.step <= last.step:
            return None
        took = sample.at - last.at
        return (sample.step - last.step) / took if took >= 5 else None

    def _left_out(self, sample: Sample) -> bool:
        """Whether a loss scaler left the update out: then what is not finite is its search."""
        lr, last = sample.lr, self._last
        moved = last is not None and lr is not None and last.lr is not None and lr != last.lr
        stood = last is not None and lr is not None and lr == last.lr
        self._lr_moves = min(50, self._lr_moves + 1) if moved else self._lr_moves
        if sample.skipped > 0:
            return True
        finite = sample.loss is None or math.isfinite(sample.loss)
        norm_bad = sample.grad_norm is None or not math.isfinite(sample.grad_norm)
        if not finite or not norm_bad:
            return False
        return lr == 0.0 or (stood and self._lr_moves >= 5)

    def _scaler(self, sample: Sample) -> list[Signal]:
        scale = sample.loss_scale
        if scale is not None and math.isfinite(scale):
            self._highest_scale = max(self._highest_scale, scale)
        if sample.skipped > 0:
            self._skips += sample.skipped
        elif sample.form != "overflow" and sample.loss is not None:
            self._skips = 0
            self._told_scale = False
        at_floor = scale is not None and scale <= 1 < self._highest_scale and self._skips > 0
        if self._told_scale or not (
            self._skips > self._limits.skips or at_floor or sample.at_minimum
        ):
            return []
        self._told_scale = True
        said = f"the loss scale fell to {scale:g}" if scale is not None else "the loss scale is low"
        if sample.at_minimum:
            said = "the loss scale cannot go lower"
        return [
            Signal(
                kind=Kind.SCALE,
                metric="loss_scale",
                step=sample.step,
                first_bad=max(0, sample.step - self._skips + 1),
                value=scale,
                why=f"{said} and {self._skips} updates in a row were left out"
                f" by step {sample.step}",
                at=sample.at,
                line=sample.line,
            )
        ]

    def _finite(self, sample: Sample, *, left_out: bool) -> list[Signal]:
        values = {name: getattr(sample, name) for name in self._levels}
        bad = [n for n, v in values.items() if v is not None and not math.isfinite(v)]
        if bad and (not left_out or self._skips > self._limits.skips):
            self._bad_for += 1
            if self._bad is not None:
                return []
            since = self._without_since if self._without_since is not None else sample
            what = " and ".join(bad)
            self._bad = Signal(
                kind=Kind.NOT_FINITE,
                metric=bad[0],
                step=sample.step,
                first_bad=since.step,
                value=values[bad[0]],
                why=f"{what} {'is' if len(bad) == 1 else 'are'} {values[bad[0]]}"
                f" at step {sample.step}",
                at=sample.at,
                line=sample.line,
            )
            return [self._bad]
        said = any(v is not None for v in values.values())
        if self._bad is None or bad or not said or values[self._bad.metric] is None:
            return []
        over, lasted, self._bad, self._bad_for = self._bad, self._bad_for, None, 0
        return [self._over(over.kind, over.metric, over.first_bad, sample, lasted)]

    def _present(self, sample: Sample, *, left_out: bool) -> list[Signal]:
        """A loss that was always there and is not: trainers leave out what is not finite."""
        seen = self._with_loss.get(sample.form, 0)
        if not self._gone(sample):
            self._with_loss[sample.form] = min(seen + 1, 1000)
            missed, self._without = self._without, 0
            since, self._without_since = self._without_since, None
            told, self._missed = self._missed, False
            if not missed or since is None or (self._bad is not None and not told):
                return []
            return [self._over(Kind.MISSING, "loss", since.step, sample, missed)]
        if seen < self._limits.recent or left_out or sample.form == "overflow":
            if not left_out and seen < 1000:
                self._with_loss[sample.form] = max(0, seen - 1)
            return []
        self._without += 1
        self._without_since = self._without_since or sample
        if self._without != self._limits.missing or self._bad is not None:
            return []
        self._missed = True
        return [self._missing(self._without_since, sample)]

    def _gone(self, sample: Sample) -> bool:
        """Not printed, or exactly 0 all at once, which no loss is that was not near it before."""
        if sample.loss is None:
            return True
        return sample.loss == 0 and self._levels["loss"].positive

    def _missing(self, since: Sample, sample: Sample) -> Signal:
        what = "is not printed any more" if since.loss is None else "is exactly 0"
        return Signal(
            kind=Kind.MISSING,
            metric="loss",
            step=sample.step,
            first_bad=since.step,
            value=since.loss,
            why=f"the loss {what} since step {since.step}, as trainers do when it is not finite",
            at=sample.at,
            line=since.line,
        )

    def end(self) -> list[Signal]:
        """What the end of the series leaves open: a loss that is missing in its last samples."""
        since, last = self._without_since, self._last
        seen = max(self._with_loss.values(), default=0)
        if since is None or last is None or self._missed or self._bad is not None:
            return []
        return [self._missing(since, last)] if seen >= self._limits.base else []

    def _over(self, of: Kind, metric: str, since: int, sample: Sample, lasted: int) -> Signal:
        what = "was not printed" if of is Kind.MISSING else "was not finite"
        times = "once" if lasted == 1 else f"{lasted} times"
        return Signal(
            kind=Kind.RECOVERED,
            metric=metric,
            of=of,
            step=sample.step,
            first_bad=since,
            lasted=lasted,
            why=f"{metric} {what} {times} from step {since} on and is normal at step {sample.step}",
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
    return min(falls) > -0.05 * whole and max(falls) < 0.55 * whole


def blocks(values: Sequence[float], count: int) -> list[float]:
    """Medians of `count` parts of equal length."""
    size = len(values) / count
    if size < 1:
        return list(values)
    cut = [values[int(i * size) : int((i + 1) * size)] for i in range(count)]
    return [_median(part) for part in cut]


def _next_epoch(last: Sample, sample: Sample) -> bool:
    """Steps that are counted anew in every epoch are no restart."""
    return last.epoch is not None and sample.epoch is not None and sample.epoch > last.epoch


def _median(values: Iterable[float]) -> float:
    """0 of nothing."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def _spread(values: Iterable[float], middle: float) -> float:
    """Standard deviation of noise with this median absolute deviation."""
    return 1.4826 * _median(abs(value - middle) for value in values)
