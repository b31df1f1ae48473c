"""A small loss of speed that lasts: too small for a comparison of single steps (levels.Pace).

Used by signals.py. Medians of blocks of samples are compared: the newest few with those before. A
pause, an evaluation or a slow step in ten is in no median. All newest ones must lie below all older
ones, which by chance is one case in a thousand, and by twice the range of the older ones: speed
that wanders is no sag, and neither is one that does not keep the level that it fell to.
"""

from __future__ import annotations

import statistics
from collections import deque

from everstep.diagnosis.abnormal import Kind, Limits, Signal
from everstep.diagnosis.sample import Sample

STEADY = 2.0
"""Times the range of the older medians, and of the newest ones: so large must the fall be."""


class Sag:
    """Speed in blocks of samples."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._block: list[float] = []
        self._began = 0
        self._blocks: deque[tuple[int, float]] = deque(maxlen=limits.sag_before + limits.sag_after)
        """The first step of each, and its median."""
        self._fell: Signal | None = None

    def restart(self) -> None:
        """Other machines, perhaps fewer: nothing before is a past to compare with."""
        self._block.clear()
        self._blocks.clear()
        self._fell = None

    def take(self, sample: Sample, speed: float) -> Signal | None:
        if not self._block:
            self._began = sample.step
        self._block.append(speed)
        if len(self._block) < self._limits.sag_block:
            return None
        median = statistics.median(self._block)
        self._blocks.append((self._began, median))
        self._block.clear()
        if self._fell is not None:
            return self._recovered(sample, median)
        if len(self._blocks) == self._blocks.maxlen:
            return self._fallen(sample)
        return None

    def _fallen(self, sample: Sample) -> Signal | None:
        before = [median for _, median in self._blocks][: self._limits.sag_before]
        after = [median for _, median in self._blocks][self._limits.sag_before :]
        normal, now = statistics.median(before), statistics.median(after)
        unsteady = max(max(before) - min(before), max(after) - min(after))
        if now > self._limits.sag * normal or normal - now < STEADY * unsteady:
            return None
        if max(after) >= min(before):
            return None
        since = self._blocks[self._limits.sag_before][0]
        self._fell = Signal(
            kind=Kind.SAG,
            metric="speed",
            step=sample.step,
            first_bad=since,
            value=now,
            normal=normal,
            why=f"speed is {now / normal:.1%} of what it was, since about step {since}: the medians"
            f" of {len(after)} times {self._limits.sag_block} steps are all below those of"
            f" {len(before)} times before",
            at=sample.at,
            line=sample.line,
        )
        return self._fell

    def _recovered(self, sample: Sample, median: float) -> Signal | None:
        """Half the way back is back; a past is gathered anew."""
        fell = self._fell
        assert fell is not None
        assert fell.normal is not None
        if median < (1 + self._limits.sag) / 2 * fell.normal:
            return None
        self.restart()
        return Signal(
            kind=Kind.RECOVERED,
            metric="speed",
            of=Kind.SAG,
            step=sample.step,
            first_bad=fell.first_bad,
            value=median,
            normal=fell.normal,
            why=f"speed was back at {median / fell.normal:.1%} at step {sample.step}, after it fell"
            f" at about step {fell.first_bad}",
            at=sample.at,
            line=sample.line,
        )
