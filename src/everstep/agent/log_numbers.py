"""Training's numbers from the logs of scripts that are not attached, as common trainers print them.

Used by the shell: what output.py reads for people is read here too. One rank's numbers are told,
the lowest rank that prints any.
"""

from __future__ import annotations

import re

from everstep.agent.progress import SPEED_FROM_S
from everstep.core.agent_io import NumbersRead
from everstep.diagnosis.progress import PREFILTER, Reader
from everstep.diagnosis.sample import Sample
from everstep.events import OutputLines
from everstep.model import NO_GENERATION, Generation, Rank, Step
from everstep.sightings import Numbers

KEPT = 50
"""Samples that wait to be told: the newest ones."""
_MAYBE = re.compile(
    "|".join(f"(?:{pattern.removeprefix('(?i)')})" for pattern in PREFILTER), re.IGNORECASE
)


class LogNumbers:
    """The logs of one generation's ranks on this machine."""

    def __init__(self) -> None:
        self._generation: Generation = NO_GENERATION
        self._readers: dict[Rank, Reader] = {}
        self._found: dict[Rank, list[Numbers]] = {}

    def read(self, lines: OutputLines) -> None:
        """Take new output of a rank."""
        if lines.generation != self._generation:
            self._generation = lines.generation
            self._readers, self._found = {}, {}
        reader = self._readers.setdefault(lines.rank, Reader())
        for line in lines.text.splitlines():
            if _MAYBE.search(line):
                for sample in reader.read(line):
                    found = self._found.setdefault(lines.rank, [])
                    found.append(_numbers(sample))
                    del found[:-KEPT]

    def take(self, generation: Generation) -> NumbersRead | None:
        """What was printed since the last time; None if nothing."""
        if generation != self._generation or not self._found:
            return None
        rank = min(self._found)
        numbers, self._found[rank] = tuple(self._found[rank]), []
        if not numbers:
            return None
        return NumbersRead(generation=generation, rank=rank, logged=True, numbers=numbers)


def _numbers(sample: Sample) -> Numbers:
    short = sample.step_s is not None and sample.step_s < SPEED_FROM_S
    return Numbers(
        step=Step(max(0, sample.step)),
        loss=sample.loss,
        grad_norm=sample.grad_norm,
        speed=None if short else sample.speed,
        loss_scale=sample.loss_scale,
        skipped=sample.skipped,
        lr=sample.lr,
    )
