"""The words of the judge of numbers: what counts as abnormal, and what it says of it."""

from __future__ import annotations

from enum import StrEnum

from everstep.model import Seconds, Value


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
    sag: float = 0.96
    """Times the median speed before: a smaller loss that lasts (a real one was 5 %)."""
    sag_block: int = 50
    """Of so many samples a median is taken, which is what is compared."""
    sag_after: int = 4
    sag_before: int = 10
    """So many of those medians must all lie below so many before them."""
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
    SAG = "sag"
    """Speed fell a little, and stays there."""
    DIFFERS = "differs"
    """A step that was done again came to other bits: silent corruption."""
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
