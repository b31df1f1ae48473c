"""Whom an ambiguous failure points at: a crash is matched with what checks had said before.

A CUDA error or a broken connection may come from code, from a device, from the other end. Together
with a check that had its doubts about that very machine, it is enough (ByteRobust: a crash is first
matched with the events collected up to then). Asked by evicting.py once all ranks have stopped.
"""

from __future__ import annotations

from collections.abc import Iterator

from everstep.core.alerts import Accusation, doubts, sentence
from everstep.core.evidence import Judged, is_users
from everstep.core.state import FailureKind, Machine, Noted, State
from everstep.diagnosis.words import Category, Grade
from everstep.model import MachineId, Seconds

DEVICES = frozenset({Grade.HOST, Grade.HARDWARE, Grade.DEVICE})
"""Roots that point at the machine that printed them, if a check of it has doubts, too."""
ANYWHERE = frozenset({*DEVICES, Grade.NETWORK})
"""Roots that point at the machine of which a check says the same kind of thing, whoever printed
them: a broken link is told of by its other end as well."""


def never_starts(state: State, now: Seconds) -> Iterator[Accusation]:
    """A member that could not start its ranks, and could not in a generation before either.

    What the first time may have been a launcher that died is the machine's own doing the second.
    """
    incident = state.incident
    if incident is None:
        return
    last = incident.starts[-1].at if incident.starts else None
    failed = [f for f in incident.failures if f.kind is FailureKind.NOT_STARTED and f.machine]
    for failure in failed:
        before = [f for f in failed if f.machine == failure.machine and f.at < failure.at]
        if last is None or failure.at < last or not before or failure.machine is None:
            continue
        if state.machines[failure.machine].node_rank is not None:
            why = f"{failure.text}, for the second time in this incident"
            yield Accusation(machine=failure.machine, at=now, event=failure.event, why=why)


def pointed_at(state: State, found: Judged, now: Seconds) -> list[Accusation]:
    """Members that neither the failure nor a check accuses alone, but both together do."""
    if is_users(found) or not state.alerted:
        return []
    accused = []
    for machine in state.members():
        doubted = doubts(state, machine, now) if machine.machine in state.alerted else []
        fitting = _fitting(machine, found, doubted) if doubted else None
        if fitting is not None:
            accused.append(
                Accusation(
                    machine=machine.machine,
                    at=fitting.since,
                    event=found.event,
                    why=f"{found.sentence}; besides, {sentence(fitting.alert)}",
                    cause=fitting.alert.result.cause,
                    source=fitting.alert.source,
                )
            )
    return accused


def _fitting(machine: Machine, found: Judged, doubted: list[Noted]) -> Noted | None:
    """The doubt that fits the failure."""
    answer = found.answer
    grade = answer.evidence[0].grade
    if grade in DEVICES and machine.machine in _printers(found):
        return doubted[0]
    if grade not in ANYWHERE or answer.category is Category.NONE:
        return None
    alike = (each for each in doubted if each.alert.result.category is answer.category)
    return next(alike, None)


def _printers(found: Judged) -> set[MachineId]:
    return {
        MachineId(finding.speaker.machine)
        for finding in found.answer.evidence
        if finding.rule == found.rule and finding.speaker.machine is not None
    }
