"""Whom a cause accuses: a rank, a machine, or rather nobody.

Used by judge.py. False evictions are the expensive mistake, so every step here can only narrow:
more than a few machines at once are not the machines, unless clocks show that one was first.
"""

from __future__ import annotations

from collections.abc import Sequence

from everstep.diagnosis.causes import Cause, Course
from everstep.diagnosis.findings import Finding
from everstep.diagnosis.rules import Accuses
from everstep.diagnosis.who import Who
from everstep.diagnosis.words import FirstAction, RootClass
from everstep.model import Rank, Seconds, Value

FIRST_BY_S: Seconds = 0.1
"""A machine that printed a fault this much before all others was first. Clocks of a cluster agree
within a millisecond where NTP or PTP runs."""
FEW_SHARE = 0.1
"""More machines than this share of the job (and more than two) are not the machines: a switch, a
driver, a storage, the code. core/accusers.py guards evictions by the same numbers."""
FEW = 2


class Accused(Value, frozen=True, kw_only=True):
    """The culprits, and what follows from how sure that is."""

    ranks: tuple[Rank, ...] = ()
    machines: tuple[str, ...] = ()
    action: FirstAction | None = None
    """Instead of the rule's."""
    root: RootClass | None = None
    why: str = ""
    undecided: str = ""


NOBODY = Accused()


def accused_by(cause: Cause, course: Course, who: Who) -> Accused:
    """Whom this cause speaks about."""
    if cause.first.accused_ranks or cause.first.accused_machines:
        return _as_found(cause.findings, who)
    if cause.accuses is Accuses.NOBODY:
        return NOBODY
    if cause.accuses is Accuses.NAMED:
        machines, ranks = _named(cause.findings, who)
    else:
        machines = cause.machines
        ranks = cause.ranks if cause.accuses is Accuses.PRINTER else ()
    hosts = course.site.hosts
    if hosts:
        machines = tuple(machine for machine in machines if machine in hosts)
    if not machines and len(ranks) == 1:
        return Accused(ranks=ranks)
    if not machines and (common := who.only_machine(course.failed_attempts)):
        return Accused(
            machines=(common,),
            why=f"{common} is the only machine that all failed attempts ran on",
        )
    return _few(machines, ranks, cause, course)


def _as_found(findings: Sequence[Finding], who: Who) -> Accused:
    """An analyser has named them itself."""
    ranks = tuple(dict.fromkeys(rank for each in findings for rank in each.accused_ranks))
    named = [machine for each in findings for machine in each.accused_machines]
    return Accused(ranks=ranks, machines=tuple(dict.fromkeys(who.node(m) or m for m in named)))


def _named(findings: Sequence[Finding], who: Who) -> tuple[tuple[str, ...], tuple[Rank, ...]]:
    machines: dict[str, None] = {}
    ranks: dict[Rank, None] = {}
    for name in (name for each in findings for name in each.named):
        if name.startswith("rank "):
            ranks[Rank(int(name.removeprefix("rank ")))] = None
        else:
            node = who.node(name)
            if node is not None and (who.is_machine(node) or who.may_be_machine(node)):
                machines[node] = None
    for rank in ranks:
        node = who.machine_of(rank)
        if node is not None:
            machines[node] = None
    return tuple(machines), tuple(ranks)


def _few(
    machines: tuple[str, ...], ranks: tuple[Rank, ...], cause: Cause, course: Course
) -> Accused:
    evicts = cause.first.action is FirstAction.EVICT_MACHINE
    if len(machines) == 1:
        return Accused(machines=machines, ranks=ranks if len(ranks) == 1 else ())
    if not machines:
        return NOBODY
    leader = _first_machine(cause.findings)
    if leader is not None:
        return Accused(
            machines=(leader.speaker.machine or "",),
            ranks=(leader.speaker.rank,) if leader.speaker.rank is not None else (),
            why=f"{leader.speaker.machine} was the first of {len(machines)} machines by the clock",
        )
    if evicts and len(machines) <= max(FEW, FEW_SHARE * course.machines):
        return Accused(machines=machines)
    if evicts:
        return Accused(
            action=FirstAction.STOP_TIME_CHECK,
            why=f"{len(machines)} machines show it at once, which is not {len(machines)} faults",
            undecided="which machine was first: a stop-time test, or clocks that agree",
        )
    return NOBODY


def _first_machine(findings: Sequence[Finding]) -> Finding | None:
    """The finding of the machine that was first by its clock, if it was clearly so."""
    firsts: dict[str, Finding] = {}
    for finding in findings:
        machine = finding.speaker.machine
        if machine is None or finding.at is None:
            return None
        known = firsts.get(machine)
        if known is None or finding.at < (known.at or 0.0):
            firsts[machine] = finding
    order = sorted(firsts.values(), key=lambda finding: finding.at or 0.0)
    if len(order) < 2 or (order[1].at or 0.0) - (order[0].at or 0.0) < FIRST_BY_S:
        return None
    return order[0]
