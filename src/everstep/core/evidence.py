"""What the evidence of a failure says: diagnosis on what agents found in the output of ranks.

Asked by rules.py once all old ranks have stopped, so that every machine has told what its ranks
printed; the same judgement as `everstep diagnose` makes from files.
"""

from __future__ import annotations

from everstep.core.alerts import Accusation
from everstep.core.state import Evidence, State
from everstep.diagnosis.answer import Answer
from everstep.diagnosis.causes import Course
from everstep.diagnosis.findings import Site
from everstep.diagnosis.judge import Facts, judge
from everstep.diagnosis.tables import own_grades, own_rules
from everstep.diagnosis.who import Who
from everstep.diagnosis.words import FirstAction, Grade, RootClass
from everstep.events import EvidenceFound
from everstep.model import MachineId, NodeRank, Seconds, Value

EVIDENCE_MAX = 500
"""Pieces of evidence kept of one failure: the first ones count, the rest is consequences."""
ITS_OWN = frozenset({Grade.HOST, Grade.HARDWARE})
SURVIVED_STEPS = 3
"""A line after which training made so many steps did not end it."""
SURVIVED_S: Seconds = 600.0
"""The same for scripts that report no steps: as long as a collective usually waits before it fails
(ten minutes with NCCL). A shorter time would drop the cause of a hang, a longer one keep warnings
that training survived."""


class Judged(Value, frozen=True, kw_only=True):
    """The answer, and what it rests on."""

    answer: Answer
    event: int
    """Number of the event that told the line it rests on."""
    rule: str

    @property
    def sentence(self) -> str:
        """For people."""
        line = next((f.place.text for f in self.answer.evidence if f.place is not None), "")
        return f"{self.answer.category.replace('_', ' ')}: {self.answer.why} {line!r}".strip()


def evidence_found(state: State, event: EvidenceFound, now: Seconds) -> None:
    """Kept until ranks are started again: what it means is asked when they have stopped."""
    if event.generation < state.last_started or len(state.evidence) >= EVIDENCE_MAX:
        return
    state.evidence += [
        Evidence(
            event=state.seq,
            generation=event.generation,
            at=now,
            finding=finding,
        )
        for finding in event.findings
    ]


def judged(state: State) -> Judged | None:
    """What the evidence says; None if there is none, or it says nothing."""
    live = [each for each in state.evidence if not _survived(state, each)]
    if not live:
        return None
    rules = {rule.id: rule for rule in own_rules().rule}
    site = _site(state)
    facts = Facts(
        findings=tuple(each.finding for each in live),
        marks=(),
        exits=(),
        course=Course(site=site, fresh_code=False, progress={}, machines=state.job.nnodes),
    )
    answer = judge(facts, rules, own_grades(), Who(site))
    if not answer.evidence:
        return None
    first = answer.evidence[0]
    event = next((each.event for each in live if each.finding.place == first.place), live[0].event)
    return Judged(answer=answer, event=event, rule=first.rule)


def accused_by_output(state: State, found: Judged, now: Seconds) -> list[Accusation]:
    """Members that the evidence says to evict, because they or their devices said it themselves.

    What only follows from who else did not fail, such as a file that one machine lacks, may be the
    program's doing and is tried again first: a restart costs seconds.
    """
    first = found.answer.evidence[0]
    if found.answer.first_action is not FirstAction.EVICT_MACHINE or first.grade not in ITS_OWN:
        return []
    members = {machine.machine for machine in state.members()}
    return [
        Accusation(machine=MachineId(m), at=now, event=found.event, why=found.sentence)
        for m in found.answer.accused_machines
        if MachineId(m) in members
    ]


def is_users(found: Judged) -> bool:
    """Whether a program, its configuration or its data is the cause."""
    return found.answer.root_class is RootClass.USER_CODE


def _survived(state: State, evidence: Evidence) -> bool:
    """Training went on after it, or, where no step is known, for long."""
    step = evidence.finding.step
    if step is not None:
        return state.furthest >= step + SURVIVED_STEPS
    incident = state.incident
    return incident is not None and incident.opened_at > evidence.at + SURVIVED_S


def _site(state: State) -> Site:
    positions = (state.positions.get(NodeRank(n), "") for n in range(state.job.nnodes))
    return Site(
        world_size=state.job.world_size,
        ranks_per_machine=state.job.nproc_per_node,
        hosts=tuple(positions),
    )
