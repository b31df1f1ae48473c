"""In front of the controller's core, with intake.py: finds what is abnormal in training's numbers.

The rules are diagnosis.signals' own, so what stops a job is what `everstep diagnose` would say of
its log. One machine's rank is listened to at a time; a loss that is not finite counts on any rank.
"""

from __future__ import annotations

from everstep.diagnosis.abnormal import NUMERIC, Kind, Signal
from everstep.diagnosis.sample import Sample
from everstep.diagnosis.signals import Judge
from everstep.events import MachineNumbers, MetricAbnormal, Numbers
from everstep.model import NO_GENERATION, Generation, MachineId, Step

TOLD = NUMERIC | {Kind.SLOW, Kind.RAMP}
"""A rise that is no jump is for people who look at curves, and what is over needs nobody."""


class NumbersJudge:
    """All machines' numbers of the newest generation; what was normal outlives a generation."""

    def __init__(self) -> None:
        self._judge = Judge()
        self._generation: Generation = NO_GENERATION
        self._witness: MachineId | None = None
        self._stopped = False
        """Something was told that ends this generation."""

    def take(self, report: MachineNumbers) -> list[MetricAbnormal]:
        """What this report shows that was not known; mostly nothing."""
        if report.generation < self._generation:
            return []
        if report.generation > self._generation:
            self._generation = report.generation
            self._witness, self._stopped = None, False
            self._judge.restart()
        found = self._bad(report)
        if self._witness is None and any(n.loss is not None for n in report.numbers):
            self._witness = report.machine
        if report.machine == self._witness:
            found += [
                self._abnormal(report, signal)
                for numbers in report.numbers
                for signal in self._judge.handle(_sample(numbers))
                if signal.kind in TOLD
            ]
        return self._first_only(found)

    def _bad(self, report: MachineNumbers) -> list[MetricAbnormal]:
        bad = report.bad
        if bad is None or self._stopped:
            return []
        return [
            MetricAbnormal(
                generation=report.generation,
                machine=report.machine,
                rank=bad.rank,
                kind=Kind.NOT_FINITE,
                metric="loss",
                step=bad.step,
                first_bad=bad.step,
                why=f"the loss of rank {bad.rank} was not finite at step {bad.step}",
            )
        ]

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
