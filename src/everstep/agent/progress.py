"""Reads the heartbeat slots: how far the ranks of one generation are, and who left them there.

And beside them the paces: what ranks do, and how long they compute in a step.

Used by the shell on a timer, after a notice, and once at its start (adoption). Only reads.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from everstep.agent.paces import Paces
from everstep.core.agent_io import NumbersRead, SlotsRead
from everstep.model import NO_STEP, Generation, Rank, Seconds, Step
from everstep.sightings import BadNumber, Numbers
from everstep.trainer.heartbeat import Heartbeat, SlotReader
from everstep.trainer.pace import FILE

FIRST_PROGRESS_EVERY_S: Seconds = 0.025
"""Between looks while the first step of a generation is awaited: a restart's last phase."""
EVERY_S: Seconds = 0.2
"""Between looks otherwise. The controller hears of progress once a second."""
FAST_FOR_S: Seconds = 30.0
"""A script that has not attached by then may never: stop looking so often."""
SPEED_FROM_S: Seconds = 0.1
"""The speed of shorter steps is not judged: a busy processor alone doubles them."""
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
        self._numbers_of: dict[Generation, Step] = {}
        self._paces = Paces(heartbeat.with_name(FILE), local_ranks)

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
        paces = self._paces.read(generation, self._rank_of(generation))
        return SlotsRead(
            generation=generation,
            slowest=Step(min(beat.step for beat in beats)),
            fastest=Step(max(beat.step for beat in beats)),
            step_s=_first_number(sorted((beat.step_s for beat in beats), reverse=True)),
            loss=_first_number(beat.loss for beat in beats),
            attached=any(beat.attached for beat in beats),
            phase=paces.phase,
            phase_s=paces.phase_s,
            computes=paces.computes,
        )

    def _rank_of(self, generation: Generation) -> dict[int, Rank]:
        """Of each slot whose rank is of this generation."""
        read = [] if self._reader is None else self._reader.read()
        return {
            index: Rank(beat.rank)
            for index, beat in enumerate(read)
            if beat is not None and beat.generation == generation
        }

    def communicating(self) -> bool:
        """Whether any rank here says that it exchanges data with others. Any thread may ask."""
        return self._reader is not None and any(self._reader.communicating_since())

    def numbers(self, generation: Generation) -> NumbersRead | None:
        """The newest step of the first rank that reports a loss, and the first bad loss of all.

        None while no rank is attached: then its log may tell more (agent/log_numbers.py).
        """
        beats = [beat for beat in self.of(generation) if beat.attached]
        if not beats:
            return None
        bad = _first({beat.rank: beat.bad_step for beat in beats})
        differs = _first({beat.rank: beat.differs_step for beat in beats})
        told = next((beat for beat in beats if not math.isnan(beat.loss)), beats[0])
        new = told.step > self._numbers_of.get(generation, NO_STEP)
        self._numbers_of = {generation: Step(told.step)}
        return NumbersRead(
            generation=generation,
            rank=Rank(told.rank),
            numbers=(_numbers(told),) if new and told.step > NO_STEP else (),
            bad=bad,
            differs=differs,
        )

    def pause_s(self, seen: SlotsRead | None, running_for_s: Seconds) -> Seconds:
        """Until the next look."""
        awaited = seen is None or seen.slowest == NO_STEP
        if awaited and running_for_s < FAST_FOR_S:
            return FIRST_PROGRESS_EVERY_S
        return EVERY_S


def _first(steps: dict[int, int]) -> BadNumber | None:
    """The rank with the lowest step of those that have one."""
    known = [(step, rank) for rank, step in steps.items() if step != NO_STEP]
    if not known:
        return None
    step, rank = min(known)
    return BadNumber(rank=Rank(rank), step=Step(step))


def _numbers(beat: Heartbeat) -> Numbers:
    per_step = 1 / beat.step_s if beat.step_s > 0 else math.nan
    speed = _first_number((beat.tokens_per_s, beat.flops_per_s, per_step))
    return Numbers(
        step=Step(beat.step),
        loss=None if math.isnan(beat.loss) else beat.loss,
        grad_norm=None if math.isnan(beat.grad_norm) else beat.grad_norm,
        speed=speed if beat.step_s >= SPEED_FROM_S else None,
    )


def _first_number(values: Iterable[float]) -> float | None:
    return next((value for value in values if math.isfinite(value)), None)
