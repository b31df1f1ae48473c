"""In front of the controller's core, with intake.py: finds what is abnormal in training's numbers.

The rules are diagnosis.signals' own, so what stops a job is what `everstep diagnose` would say of
its log. One machine's rank is listened to at a time; a loss that is not finite counts on any rank.
"""

from __future__ import annotations

from everstep.diagnosis.abnormal import NUMERIC, Kind, Signal
from everstep.diagnosis.sample import Sample
from everstep.diagnosis.signals import Judge
from everstep.events import MetricAbnormal
from everstep.model import NO_GENERATION, Generation, MachineId, Step
from everstep.sightings import BadNumber, MachineNumbers, Numbers

TOLD = NUMERIC | {Kind.SLOW, Kind.RAMP, Kind.SAG}
"""A rise that is no jump is for people who look at curves, and what is over needs nobody."""


class NumbersJudge:
    """All machines' numbers of the newest generation; what was normal outlives a generation."""

    def __init__(self) -> None:
        self._judge = Judge()
        self._generation: Generation = NO_GENERATION
        self._witness: MachineId | None = None
        self._with_loss = False
        """Whether that one reports losses: until one does, speed alone is judged."""
        self._stopped = False
        """Something was told that ends this generation."""
        self._differed = False

    def take(self, report: MachineNumbers) -> list[MetricAbnormal]:
        """What this report shows that was not known; mostly nothing."""
        if report.generation < self._generation:
            return []
        if report.generation > self._generation:
            self._generation = report.generation
            self._witness, self._with_loss = None, False
            self._stopped, self._differed = False, False
            self._judge.restart()
        found = self._bad(report)
        self._choose(report)
        if report.machine == self._witness:
            found += [
                self._abnormal(report, signal)
                for numbers in report.numbers
                for signal in self._judge.handle(_sample(numbers))
                if signal.kind in TOLD
            ]
        return self._first_only(found)

    def _choose(self, report: MachineNumbers) -> None:
        """Whom to listen to: the first that reports a loss, and until then the first of all."""
        if self._with_loss or not report.numbers:
            return
        self._with_loss = any(numbers.loss is not None for numbers in report.numbers)
        if self._witness is None or self._with_loss:
            self._witness = report.machine

    def _bad(self, report: MachineNumbers) -> list[MetricAbnormal]:
        found = []
        if report.bad is not None and not self._stopped:
            why = f"the loss of rank {report.bad.rank} was not finite at step {report.bad.step}"
            found.append(_told(report, Kind.NOT_FINITE, report.bad, why))
        if report.differs is not None and not self._differed:
            self._differed = True
            why = (
                f"step {report.differs.step} was done again under deterministic flags, and the loss"
                f" of rank {report.differs.rank} has other bits than before, although earlier steps"
                " had the same: silent corruption, then or now"
            )
            found.append(_told(report, Kind.DIFFERS, report.differs, why))
        return found

    def _abnormal(self, report: MachineNumbers, signal: Signal) -> MetricAbnormal:
        return MetricAbnormal(
            generation=report.generation,
            machine=report.machine,
            rank=report.rank,
            kind=signal.kind,
            metric=signal.metric,
            step=Step(signal.step),
            first_bad=Step(signal.first_bad),
            why=signal.why,
            logged=report.logged,
        )

    def _first_only(self, found: list[MetricAbnormal]) -> list[MetricAbnormal]:
        """One thing that ends a generation is enough of it."""
        kept = []
        for each in found:
            ends = each.kind in {Kind.NOT_FINITE, Kind.MISSING}
            if not (ends and self._stopped):
                kept.append(each)
            self._stopped = self._stopped or ends
        return kept


def _told(report: MachineNumbers, kind: Kind, at: BadNumber, why: str) -> MetricAbnormal:
    return MetricAbnormal(
        generation=report.generation,
        machine=report.machine,
        rank=at.rank,
        kind=kind,
        metric="loss",
        step=at.step,
        first_bad=at.step,
        why=why,
    )


def _sample(numbers: Numbers) -> Sample:
    return Sample(
        step=numbers.step,
        loss=numbers.loss,
        grad_norm=numbers.grad_norm,
        tokens_per_s=numbers.speed,
        loss_scale=numbers.loss_scale,
        skipped=numbers.skipped,
        lr=numbers.lr,
        form="live",
    )
