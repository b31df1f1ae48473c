"""What several runs of a job say together that none of them says alone.

Used by investigation.py to tell the runs apart, and by judge.py: the same machine twice is the
machine, the same rank on other machines is the program.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import msgspec

from everstep.diagnosis.causes import Cause
from everstep.diagnosis.findings import Finding
from everstep.diagnosis.seen import Seen
from everstep.diagnosis.words import FirstAction, Grade, RootClass
from everstep.model import Value

_JOB = re.compile(r"(?:^|[-_./])(\d{4,})[-_.](?:\d+\.)?(?:out|err|log|txt)(?:\.gz|\.xz|\.bz2)?$")
"""Schedulers put the job's number into the name of its output."""


class History(Value, frozen=True, kw_only=True):
    """What the runs have in common."""

    root: RootClass
    action: FirstAction
    machine: str | None
    why: str


def told_apart(seen: Sequence[Seen]) -> list[Seen]:
    """The same texts with their runs numbered, where their names or their ranks show several."""
    if any(finding.attempt for each in seen for finding in each.findings):
        return list(seen)
    jobs = {each.file: int(found[1]) for each in seen if (found := _JOB.search(each.file))}
    if len(set(jobs.values())) > 1:
        order = sorted(set(jobs.values()))
        return [
            _renumbered(each, order.index(jobs[each.file])) if each.file in jobs else each
            for each in seen
        ]
    if _same_ranks_again(seen):
        with_ranks = [each.file for each in seen if _ranks(each)]
        return [
            _renumbered(each, with_ranks.index(each.file)) if each.file in with_ranks else each
            for each in seen
        ]
    return list(seen)


def _same_ranks_again(seen: Sequence[Seen]) -> bool:
    """One rank that fails in the same way in several texts failed in several runs."""
    counts = Counter(key for each in seen for key in _ranks(each))
    return any(count > 1 for count in counts.values())


def _ranks(seen: Seen) -> set[tuple[str, int]]:
    return {
        (finding.rule, finding.speaker.rank)
        for finding in seen.findings
        if finding.speaker.rank is not None and finding.grade is Grade.DEVICE
    }


def _renumbered(seen: Seen, attempt: int) -> Seen:
    replace = msgspec.structs.replace
    return replace(
        seen,
        findings=tuple(replace(each, attempt=attempt) for each in seen.findings),
        marks=tuple(replace(each, attempt=attempt) for each in seen.marks),
        exits=tuple(replace(each, attempt=attempt) for each in seen.exits),
    )


def history(best: Cause, causes: Sequence[Cause]) -> History | None:
    """What the runs of an ambiguous failure of a device have in common."""
    first = best.first
    if first.root is not RootClass.AMBIGUOUS or first.grade is not Grade.DEVICE:
        return None
    attempts = sorted(best.attempts)
    if len(attempts) < 2:
        return None
    device = [f for c in causes for f in c.findings if c.first.grade is Grade.DEVICE]
    machines = [_machines(device, attempt) for attempt in attempts]
    ranks = [{f.speaker.rank for f in best.findings if f.attempt == a} - {None} for a in attempts]
    common = set.intersection(*machines) if all(machines) else set()
    if len(common) == 1 and set.intersection(*ranks) != ranks[0]:
        (machine,) = common
        return History(
            root=RootClass.INFRASTRUCTURE,
            action=FirstAction.EVICT_MACHINE,
            machine=machine,
            why=f"it happened on {machine} in {len(attempts)} runs, under different ranks",
        )
    if all(len(each) == 1 for each in ranks) and ranks[0] == ranks[-1] and not common:
        if not all(machines):
            return None
        return History(
            root=RootClass.USER_CODE,
            action=FirstAction.ROLL_BACK_CODE,
            machine=None,
            why=f"it followed the rank over {len(set.union(*machines))} machines",
        )
    return None


def _machines(findings: Sequence[Finding], attempt: int) -> set[str]:
    return {
        f.speaker.machine
        for f in findings
        if f.attempt == attempt and f.speaker.machine is not None
    }
