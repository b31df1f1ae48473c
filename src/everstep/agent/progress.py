"""Reads the heartbeat slots: how far the ranks of one generation are, and who left them there.

Used by the shell on a timer, after a notice, and once at its start (adoption). Only reads.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from everstep.core.agent_io import SlotsRead
from everstep.model import NO_STEP, Generation, Seconds, Step
from everstep.trainer.heartbeat import Heartbeat, SlotReader

FIRST_PROGRESS_EVERY_S: Seconds = 0.025
"""Between looks while the first step of a generation is awaited: a restart's last phase."""
EVERY_S: Seconds = 0.2
"""Between looks otherwise. The controller hears of progress once a second."""
FAST_FOR_S: Seconds = 30.0
"""A script that has not attached by then may never: stop looking so often."""
_NS = 1e-9


class Finished(NamedTuple):
    """The newest step that all ranks here had finished; NO_STEP if unknown."""

    step: Step = NO_STEP
    age_s: Seconds = 0.0
    """How long ago the last of them finished it."""


class Progress:
    """The slots of this machine."""

    def __init__(self, heartbeat: Path, local_ranks: int) -> None:
        self._heartbeat = heartbeat
        self._local_ranks = local_ranks
        self._reader: SlotReader | None = None

    def reserve(self) -> None:
        """Make room for the slots. OSError if shared memory has none."""
        if self._reader is None:
            self._reader = SlotReader(self._heartbeat, self._local_ranks)

    def all(self) -> list[Heartbeat]:
        """Every slot that a rank ever wrote."""
        with contextlib.suppress(OSError):
            self.reserve()
        read = [] if self._reader is None else self._reader.read()
        return [beat for beat in read if beat is not None]

    def of(self, generation: Generation) -> list[Heartbeat]:
        """Slots of this generation's ranks."""
        return [beat for beat in self.all() if beat.generation == generation]

    def finished(self, before: Generation, now_ns: int) -> Finished:
        """How far the newest generation older than `before` got. `now_ns` is CLOCK_MONOTONIC."""
        older = [beat for beat in self.all() if beat.generation < before]
        newest = max((beat.generation for beat in older), default=0)
        beats = [beat for beat in older if beat.generation == newest and beat.attached]
        step = Step(min((beat.step for beat in beats), default=NO_STEP))
        if len(beats) < self._local_ranks or step == NO_STEP:
            return Finished()
        reached_ns = max(beat.at_ns for beat in beats if beat.step == step)
        return Finished(step, max(0.0, (now_ns - reached_ns) * _NS))

    def read(self, generation: Generation) -> SlotsRead | None:
        """What the core is told; None while no rank of this generation has written its slot."""
        beats = self.of(generation)
        if not beats:
            return None
        return SlotsRead(
            generation=generation,
            slowest=Step(min(beat.step for beat in beats)),
            fastest=Step(max(beat.step for beat in beats)),
            step_s=_first_number(sorted((beat.step_s for beat in beats), reverse=True)),
            loss=_first_number(beat.loss for beat in beats),
        )

    def communicating(self) -> bool:
        """Whether any rank here says that it exchanges data with others. Any thread may ask."""
        return self._reader is not None and any(self._reader.communicating_since())

    def pause_s(self, seen: SlotsRead | None, running_for_s: Seconds) -> Seconds:
        """Until the next look."""
        awaited = seen is None or seen.slowest == NO_STEP
        if awaited and running_for_s < FAST_FOR_S:
            return FIRST_PROGRESS_EVERY_S
        return EVERY_S


def _first_number(values: Iterable[float]) -> float | None:
    return next((value for value in values if math.isfinite(value)), None)
