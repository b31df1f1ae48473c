"""Reads what ranks say in the file "paces": what they do, and how long they compute in a step.

progress.py asks at every look at the heartbeat slots. The steps that ranks have computed are kept
here, so that what is told is the median of the newest ones and not one of them.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from everstep.core.phases import foremost
from everstep.model import NO_GENERATION, Generation, Rank, RankPhase, Seconds
from everstep.sightings import Computes
from everstep.trainer.pace import Pace, PaceReader

STEPS = 20
"""The median of so many newest steps that were seen is told; of fewer nothing is."""
SETTLING = 5
"""Steps of a generation that were seen first and are left out: compilation, cold caches."""
ALL_TOLD = 2
"""Of more ranks than this only the slowest and the fastest are told."""
_NS = 1e-9


class Seen(NamedTuple):
    """What the ranks of one generation say."""

    phase: RankPhase = RankPhase.TRAINING
    phase_s: Seconds = 0.0
    computes: tuple[Computes, ...] = ()


class Paces:
    """The entries of this machine, and the newest steps of each rank."""

    def __init__(self, path: Path, local_ranks: int) -> None:
        self._path = path
        self._local_ranks = local_ranks
        self._reader: PaceReader | None = None
        self._generation: Generation = NO_GENERATION
        self._steps: dict[Rank, _Steps] = {}

    def read(self, generation: Generation, rank_of: Mapping[int, Rank]) -> Seen:
        """What the ranks in these slots say now. Nothing is known of those that say nothing."""
        if generation < self._generation:
            return Seen()
        if generation > self._generation:
            self._generation = generation
            self._steps = {}
        now_ns = time.monotonic_ns()
        phases = []
        for index, pace in enumerate(self._all()):
            rank = rank_of.get(index)
            if rank is None or pace is None or pace.generation != generation:
                continue
            phases.append((pace.phase, max(0.0, (now_ns - pace.since_ns) * _NS)))
            self._steps.setdefault(rank, _Steps()).take(pace)
        phase, phase_s = foremost(phases)
        return Seen(phase, phase_s, _ends(self._computes()))

    def _all(self) -> list[Pace | None]:
        if self._reader is None:
            with contextlib.suppress(OSError):  # no memory left: nothing is known
                self._reader = PaceReader(self._path, self._local_ranks)
        return [] if self._reader is None else self._reader.read()

    def _computes(self) -> Iterable[Computes]:
        for rank, steps in self._steps.items():
            seconds = steps.median_s()
            if seconds is not None:
                yield Computes(rank=rank, seconds=seconds)


class _Steps:
    """One rank's newest steps."""

    def __init__(self) -> None:
        self._newest = -1
        self._settling = SETTLING
        self._seconds: deque[Seconds] = deque(maxlen=STEPS)

    def take(self, pace: Pace) -> None:
        if pace.step == self._newest:
            return
        self._newest = pace.step
        if self._settling:
            self._settling -= 1
        elif math.isfinite(pace.compute_s):
            self._seconds.append(pace.compute_s)

    def median_s(self) -> Seconds | None:
        return statistics.median(self._seconds) if len(self._seconds) == STEPS else None


def _ends(computes: Iterable[Computes]) -> tuple[Computes, ...]:
    """By rank, or if they are many the slowest and the fastest."""
    known = sorted(computes, key=lambda each: each.rank)
    if len(known) <= ALL_TOLD:
        return tuple(known)
    known.sort(key=lambda each: (-each.seconds, each.rank))
    return (known[0], known[-1])
