"""Judges training's numbers as they come: what is abnormal in loss, gradient norm and speed.

One Judge per stream of samples, with bounded memory. core/numbers.py asks it while a job runs, with
the default limits; series.py asks it about the logs of a job that is over. Thresholds are ratios,
so no unit and no scale matters; a metric that never changes is no evidence.

The rules are those of ByteRobust (section 4: NaN at once, loss or gradient norm five times its
recent past, low utilization), with what its text leaves open as a field of Limits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from everstep.diagnosis.abnormal import Kind, Limits, Signal
from everstep.diagnosis.levels import Level, Pace
from everstep.diagnosis.sags import Sag
from everstep.diagnosis.sample import Sample

SEARCHED_FROM = 1024.0
"""A loss scale that was as high and is at 1 has left out updates, also if nobody counts them."""


class Judge:
    """One stream of samples in the order of training. handle() says what changed."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._levels = {
            "loss": Level("loss", self._limits, rises=True),
            "grad_norm": Level("grad_norm", self._limits, rises=False),
        }
        self._pace = Pace(self._limits)
        self._sag = Sag(self._limits)
        self._first: int | None = None
        self._last: Sample | None = None
        self._stride = 1
        self._settling = self._limits.settle
        self._bad: Signal | None = None
        self._bad_for = 0
        self._norm_bad = 0
        self._norm_bad_since: Sample | None = None
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
                found += self._slower(sample, speed)
        if sample.form not in ("overflow", "deepspeed", "speed"):
            self._last = sample
        return found

    def restart(self) -> None:
        """Training begins again somewhere: what was normal stays so, what was bad is over."""
        self._bad = None
        self._bad_for = self._norm_bad = self._without = self._skips = 0
        self._norm_bad_since = self._without_since = self._last = None
        self._missed = self._told_scale = False
        for level in self._levels.values():
            level.restart()
        self._settling = self._limits.settle
        self._pace.restart()
        self._sag.restart()

    def _note_restart(self, sample: Sample) -> None:
        last = self._last
        if last is None:
            return
        other = sample.attempt is not None and sample.attempt != last.attempt
        back = sample.step < last.step - 2 * self._stride and not _next_epoch(last, sample)
        if other or back:
            self._settling = self._limits.settle
            self._pace.restart()
            self._sag.restart()
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

    def _slower(self, sample: Sample, speed: float) -> list[Signal]:
        """A great loss of speed, else a small one: not both of the same."""
        great = self._pace.take(sample, speed, self._stride)
        if self._pace.away:
            self._sag.restart()
            small = None
        else:
            small = self._sag.take(sample, speed)
        return [signal for signal in (great, small) if signal is not None]

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
        fell = self._skips > 0 or self._highest_scale >= SEARCHED_FROM
        at_floor = scale is not None and scale <= 1 < self._highest_scale and fell
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
                first_bad=max(0, sample.step - max(1, self._skips) + 1),
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
        self._norm_bad = self._norm_bad + 1 if bad == ["grad_norm"] and not left_out else 0
        if self._norm_bad == 1:
            self._norm_bad_since = sample
        if 0 < self._norm_bad <= self._patience(sample):
            return []
        if bad and (not left_out or self._skips > self._limits.skips):
            self._bad_for += 1
            if self._bad is not None:
                return []
            early = self._norm_bad_since if self._norm_bad else None
            since = self._without_since or early or sample
            self._bad = _not_finite(sample, since.step, bad)
            return [self._bad]
        said = any(v is not None for v in values.values())
        if self._bad is None or bad or not said or values[self._bad.metric] is None:
            return []
        over, lasted, self._bad, self._bad_for = self._bad, self._bad_for, None, 0
        return [self._over(over.kind, over.metric, over.first_bad, sample, lasted)]

    def _patience(self, sample: Sample) -> int:
        """With a norm that alone is not finite: a scaler, of which nothing is said, may have left
        the update out. If it did not, the next loss is not finite either.
        """
        if sample.loss is None:
            return 0
        first = sample.step if self._first is None else self._first
        early = sample.step - first < self._limits.skip_steps
        return self._limits.skips if early else self._limits.missing - 1

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
        """What the end of the series leaves open: a loss that is missing in its last samples, or a
        norm that is not finite in them.
        """
        norm, quiet = self._norm_bad_since, self._bad is None and self._norm_bad > 0
        if norm is not None and quiet and norm.step - (self._first or 0) >= self._limits.skip_steps:
            return [_not_finite(norm, norm.step, ["grad_norm"])]
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


def _not_finite(sample: Sample, since: int, metrics: Sequence[str]) -> Signal:
    value = getattr(sample, metrics[0])
    verb = "is" if len(metrics) == 1 else "are"
    return Signal(
        kind=Kind.NOT_FINITE,
        metric=metrics[0],
        step=sample.step,
        first_bad=since,
        value=value,
        why=f"{' and '.join(metrics)} {verb} {value} at step {sample.step}",
        at=sample.at,
        line=sample.line,
    )


def _next_epoch(last: Sample, sample: Sample) -> bool:
    """Steps that are counted anew in every epoch are no restart."""
    return last.epoch is not None and sample.epoch is not None and sample.epoch > last.epoch
