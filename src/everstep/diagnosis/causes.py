"""Findings of one rule put together: how far it spread, when it began, what it means here.

Used by judge.py. A rule says what a line means by itself; its cases say what it means on one of
several machines, at the start, after a change of code, for the second time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from everstep.diagnosis.findings import Finding, Site
from everstep.diagnosis.rules import Accuses, Case, Phase, Rule, Spread
from everstep.diagnosis.who import Who
from everstep.model import Rank, Seconds, Value

HEALED = "healed"
"""What a case asks for that is to hold if every finding of its rule was over in the end."""
WENT_ON_LINES = 3
"""A root after which a text reports steps this often did not end training. One or two: others'
lines were under way."""
ALMOST_ALL = 0.75
"""Share of ranks that counts as all of them: some die before they can print."""


class Cause(Value, frozen=True, kw_only=True):
    """One possible cause, with everything that speaks for it."""

    rule: str
    findings: tuple[Finding, ...]
    """In the order of time, where known, else of the texts."""
    ranks: tuple[Rank, ...]
    machines: tuple[str, ...]
    """That printed it; in the order of time."""
    accuses: Accuses
    went_on: bool = False
    """Training made steps after it, in the same attempt."""
    went_on_at_first: bool = False
    """The same after it was printed first, though perhaps not after it was printed last."""

    @property
    def first(self) -> Finding:
        return self.findings[0]

    @property
    def at(self) -> Seconds | None:
        return self.first.at

    @property
    def attempts(self) -> frozenset[int]:
        return frozenset(finding.attempt for finding in self.findings)

    @property
    def times(self) -> int:
        return sum(finding.repeated for finding in self.findings)


class Course(Value, frozen=True, kw_only=True):
    """What the texts tell about the job as a whole."""

    site: Site
    fresh_code: bool
    progress: Mapping[str, tuple[int, ...]]
    """The lines at the end of each text that report steps."""
    machines: int
    """How many the job has, as far as known."""
    failed_ranks: frozenset[Rank] = frozenset()
    failed_machines: frozenset[str] = frozenset()
    """Of which launchers report a bad end."""
    failed_attempts: tuple[int, ...] = ()
    """Attempts in which a device or a machine may have failed."""


def causes_of(
    findings: Iterable[Finding], rules: Mapping[str, Rule], who: Who, course: Course
) -> list[Cause]:
    """All causes that findings speak for, each as its rule's case says."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.rule, []).append(_resolved(finding, who))
    present = frozenset(groups)
    causes = []
    for name, group in groups.items():
        rule = rules.get(name)
        hurt = [each for each in group if not _healed(each, rule, groups)]
        told = present if hurt else present | {HEALED}
        causes.append(_cause(hurt or group, rule, told, course, who))
    return causes


def _healed(finding: Finding, rule: Rule | None, groups: Mapping[str, list[Finding]]) -> bool:
    """Whether the same text says later that it is over, on the same machine."""
    if rule is None or not rule.healed_by or finding.place is None:
        return False
    last = max(finding.place.line, finding.last_line)
    return any(
        healer.speaker.machine == finding.speaker.machine
        and healer.place is not None
        and healer.place.file == finding.place.file
        and max(healer.place.line, healer.last_line) > last
        for healer in groups.get(rule.healed_by, ())
    )


def _resolved(finding: Finding, who: Who) -> Finding:
    """With the rank and the machine that its labels lead to."""
    speaker = msgspec.structs.replace(
        finding.speaker, rank=who.rank(finding.speaker), machine=who.machine(finding.speaker)
    )
    return msgspec.structs.replace(finding, speaker=speaker)


def _cause(
    group: list[Finding],
    rule: Rule | None,
    present: frozenset[str],
    course: Course,
    who: Who,
) -> Cause:
    group = in_time(group)
    ranks = dict.fromkeys(f.speaker.rank for f in group if f.speaker.rank is not None)
    machines = dict.fromkeys(f.speaker.machine for f in group if f.speaker.machine is not None)
    cause = Cause(
        rule=group[0].rule,
        findings=tuple(group),
        ranks=tuple(ranks),
        machines=tuple(machines),
        accuses=rule.accuses if rule is not None else Accuses.NOBODY,
        went_on=all(_went_on(finding, course, finding.last_line) for finding in group),
        went_on_at_first=all(_went_on(finding, course) for finding in group),
    )
    if rule is None:
        return cause
    case = next((case for case in rule.cases if holds(case, cause, present, course, who)), None)
    return cause if case is None else _under(cause, rule.under(case))


def _under(cause: Cause, rule: Rule) -> Cause:
    findings = tuple(
        msgspec.structs.replace(
            finding,
            role=rule.role,
            category=rule.category,
            root=rule.root,
            grade=rule.grade,
            action=rule.first_action,
            why=rule.why,
        )
        for finding in cause.findings
    )
    return msgspec.structs.replace(cause, findings=findings, accuses=rule.accuses)


def in_time(findings: Sequence[Finding]) -> list[Finding]:
    """By attempt, then by their own time stamps if all have one of a kind, else as they stand."""
    stamps = [finding.at for finding in findings]
    if all(at is not None for at in stamps):
        return sorted(findings, key=lambda finding: (finding.attempt, finding.at or 0.0))
    return sorted(findings, key=lambda finding: finding.attempt)


def _went_on(finding: Finding, course: Course, line: int = 0) -> bool:
    place = finding.place
    if place is None or finding.speaker.rank in course.failed_ranks:
        return False
    if finding.speaker.machine in course.failed_machines:
        return False
    since = max(place.line, line)
    after = sum(step > since for step in course.progress.get(place.file, ()))
    return after >= WENT_ON_LINES


def holds(case: Case, cause: Cause, present: frozenset[str], course: Course, who: Who) -> bool:
    """Whether everything that a case asks for is so."""
    asked: tuple[tuple[bool, Callable[[], bool]], ...] = (
        (case.spread is not None, lambda: case.spread in spreads(cause, course, who)),
        (case.phase is not None, lambda: case.phase is phase_of(cause, course)),
        (bool(case.beside), lambda: any(p.startswith(case.beside) for p in present)),
        (bool(case.without), lambda: not any(p.startswith(case.without) for p in present)),
        (case.fresh_code is not None, lambda: case.fresh_code is course.fresh_code),
        (bool(case.says), lambda: any(_says(case.says, f) for f in cause.findings)),
        (bool(case.trait), lambda: any(case.trait in f.traits for f in cause.findings)),
    )
    return all(check() for wanted, check in asked if wanted)


def _says(pattern: str, finding: Finding) -> bool:
    return finding.place is not None and re.search(pattern, finding.place.text) is not None


def spreads(cause: Cause, course: Course, who: Who) -> set[Spread]:
    """Over whom it was seen, as far as that is known."""
    found = set()
    size = max(course.site.size, who.world_size)
    count = max(len(cause.ranks), *(finding.repeated for finding in cause.findings))
    if size > 1 and count >= ALMOST_ALL * size:
        found.add(Spread.ALL_RANKS)
    if len(cause.machines) == 1 and course.machines > 1 and Spread.ALL_RANKS not in found:
        found.add(Spread.ONE_MACHINE)
        if _covers_its_machine(cause, course):
            found.add(Spread.WHOLE_MACHINE)
    if len(cause.machines) > 1:
        found.add(Spread.SEVERAL_MACHINES)
    return found


def _covers_its_machine(cause: Cause, course: Course) -> bool:
    per_machine = course.site.ranks_per_machine
    if per_machine == 1 or not cause.ranks:
        return True
    return len(cause.ranks) >= max(2, 0.5 * (per_machine or 0))


def phase_of(cause: Cause, course: Course) -> Phase | None:
    """Before or after the first step; None where the text reports no steps at all."""
    if any(finding.step is not None for finding in cause.findings):
        return Phase.RUNNING
    place = cause.first.place
    if place is not None and course.progress.get(place.file):
        return Phase.START
    return None
