"""What people are shown of a job: pure functions from the core's state to JSON-able structs.

server.py answers with them over HTTP, and the command line computes the same from a replayed
journal when no controller runs. They decide nothing and read nothing but their arguments.
Times are in seconds; points in time are by the controller's clock (seconds since the epoch).
"""

from __future__ import annotations

from everstep.actions import Outcome, Rung
from everstep.controller import look_views
from everstep.controller.version_views import CodeView, code, name_of
from everstep.core.alerts import usable
from everstep.core.ettr import WINDOW_S, Owner, ettr, spent
from everstep.core.history import Eviction
from everstep.core.layouts import known_layout
from everstep.core.mechanisms import Mechanism, mechanisms
from everstep.core.standby import pool
from everstep.core.state import Incident, Machine, Noted, Phase, RungTaken, State
from everstep.diagnosis.words import Verdict
from everstep.health import Counts
from everstep.model import (
    Generation,
    JobId,
    MachineId,
    NodeRank,
    Rank,
    Seconds,
    Step,
    Term,
    Value,
)

_GRAVEST = (
    Verdict.EVICT,
    Verdict.SUSPECT,
    Verdict.JOB,
    Verdict.WARN,
    Verdict.USER,
    Verdict.ERROR,
    Verdict.INFO,
)


class MachineView(Value, frozen=True, kw_only=True):
    """One machine that ever joined."""

    machine: MachineId
    host: str
    address: str
    node_rank: NodeRank | None
    ranks: tuple[Rank, ...]
    condition: str
    """member, standby, silent, lost, evicted or released."""
    why: str
    """For lost and evicted ones."""


class AlertView(Value, frozen=True, kw_only=True):
    """Something that a check, or somebody else's monitor, says of a machine and that holds."""

    machine: MachineId
    check: str
    item: str
    verdict: Verdict
    """As everywhere: `error` says that the check could not run."""
    counts: Counts
    why: str
    do: str
    source: str
    since: Seconds
    age_s: Seconds
    """Since then."""


class OutcomeView(Value, frozen=True, kw_only=True):
    """How the job ended."""

    outcome: Outcome
    exit_code: int
    why: str
    detail: str


class LayoutView(Value, frozen=True, kw_only=True):
    """What is known of how ranks form parallel groups."""

    text: str
    """As --layout would say it, the fastest dimension first; empty if nothing is known."""
    source: str
    """Where it comes from."""
    remarks: tuple[str, ...]
    """What other sources lack."""
    disagreement: str
    """Between two sources; empty if there is none."""


class EvictionView(Value, frozen=True, kw_only=True):
    """One eviction, and what became known of the machine since."""

    machine: MachineId
    host: str
    at: Seconds
    why: str
    incident: str
    guilty: bool | None
    """None: it is not known, or never will be."""
    verdict: str
    """Why, as a sentence."""
    tests: int
    passed: int
    """Tests that it passed, one after the other."""
    returned: bool
    """It is back in the job."""


class EvictionsView(Value, frozen=True, kw_only=True):
    """How many machines were evicted, and how often that was wrong."""

    count: int = 0
    guilty: int = 0
    innocent: int = 0
    false_share: float | None = None
    """Of those that got a verdict, the share that were innocent; None: none got one."""


class StatusView(Value, frozen=True, kw_only=True):
    """Answer to /v1/status."""

    job: JobId
    term: Term
    phase: Phase
    generation: Generation
    nnodes: int
    nproc_per_node: int
    standbys: int
    """The number that was asked for."""
    world_size: int
    finished_by_all: Step
    """Newest step that every rank of this generation finished, -1 for none."""
    furthest: Step
    """The same over all generations."""
    restored: Step
    step_s: Seconds | None
    loss: float | None
    published: tuple[Step, ...]
    """Steps that are whole on disk."""
    machines: tuple[MachineView, ...]
    incident: str | None
    """The open one."""
    incidents: int
    """How many there were, the open one included."""
    ettr: float | None
    ettr_hour: float | None
    """Over the last hour."""
    seconds: dict[Owner, Seconds]
    """The time account: who owned the seconds of the job's life."""
    layout: LayoutView
    mechanisms: tuple[Mechanism, ...]
    """Those that need parallel groups."""
    outcome: OutcomeView | None
    """None while the job runs."""
    notes: tuple[str, ...]
    """Pages to people, and of the controller: what it found at its start, what it turned away."""
    alerts: tuple[AlertView, ...] = ()
    """The gravest first, then the oldest; of machines that are in the job or could be."""
    code: CodeView = CodeView()
    evictions: EvictionsView = EvictionsView()
    machine_safe: Step | None = None
    """The newest step that the memory of two machines holds whole; None: there is none."""
    standbys_wanted: int = 0
    """How many there should be now."""
    standbys_why: str = ""
    """Why, as a clause, if they follow the job's history."""
    looking: str = ""
    """What is looked into now: a stall, or slow training; empty if nothing is."""
    straggler: str = ""
    """The rank that holds up all others although nothing stands still; empty if none does."""


class RungView(Value, frozen=True, kw_only=True):
    """One step of the ladder: what one recovery did."""

    rung: Rung
    generation: Generation
    failure: str
    """Class of the failure that it answers."""
    why: str
    at: Seconds
    action: str
    """Id of the decision, for `everstep why`."""


class IncidentView(Value, frozen=True, kw_only=True):
    """One incident and its time account."""

    incident: str
    symptom: str
    opened_at: Seconds
    opened_by: str
    """Id of the decision, for `everstep why`."""
    closed_at: Seconds | None
    outcome: str
    generation: Generation
    """The one that broke."""
    furthest: Step
    """Newest step finished by all ranks before it."""
    restored: Step | None
    recoveries: int
    evicted: tuple[MachineId, ...]
    failures: tuple[str, ...]
    seconds: dict[Owner, Seconds]
    cause: str = ""
    """What the evidence says, as a sentence; empty if there is none."""
    planned: bool = False
    """Nothing failed: ranks were stopped for other code, or for machines that came."""
    version: str = ""
    """Name of the code version that ran when it began."""
    rungs: tuple[RungView, ...] = ()
    verdict: str = ""
    """What the look at all stacks meant that decided it; empty if none did."""
    group: str = ""
    """The parallel group that was judged as a whole, if one was."""


class IncidentsView(Value, frozen=True, kw_only=True):
    """Answer to /v1/incidents: what the table at the end of a run shows."""

    job: JobId
    incidents: tuple[IncidentView, ...]
    seconds: dict[Owner, Seconds]
    """Of the whole job."""
    ettr: float | None
    evictions: tuple[EvictionView, ...] = ()
    evicted: EvictionsView = EvictionsView()


def _failing_copies(state: State) -> list[str]:
    """Training goes on without these copies, so somebody has to be told."""
    failed, safe = state.backups_failed, state.safe
    if failed < 2:  # one fails now and then: the order came too late
        return _failing_disks(state)
    since = "the last one on disk" if safe is None else f"step {safe.step}"
    told = (
        f"the newest {failed} backups failed: the loss of a machine costs the steps since {since}"
    )
    return [told, *_failing_disks(state)]


def _failing_disks(state: State) -> list[str]:
    disks = {"disk": state.disk, "the machines' own disks": state.local_disk}
    return [
        f"the newest copy to {place} failed and is tried again: {tier.failed}"
        for place, tier in disks.items()
        if tier.failed
    ]


def status(state: State, now: Seconds, notes: tuple[str, ...] = ()) -> StatusView:
    """Where the job is. The state must have seen JobSubmitted."""
    spec, incident, wanted = state.job, state.incident, pool(state, now)
    assert state.spec is not None, "the journal's first record must be JobSubmitted"
    return StatusView(
        job=spec.job,
        term=state.term,
        phase=state.phase,
        generation=state.generation,
        nnodes=state.spec.nnodes,
        nproc_per_node=spec.nproc_per_node,
        standbys=spec.standbys,
        world_size=spec.world_size,
        finished_by_all=state.finished_by_all,
        furthest=state.furthest,
        restored=state.restored,
        step_s=state.step_s,
        loss=state.loss,
        published=tuple(entry.step for entry in state.published),
        machines=tuple(_machine(state, machine) for machine in state.machines.values()),
        incident=incident.incident if incident else None,
        incidents=len(state.incidents),
        ettr=ettr(state.account, now),
        ettr_hour=ettr(state.account, now, window_s=WINDOW_S),
        seconds=spent(state.account, now),
        layout=_layout(state),
        mechanisms=mechanisms(state),
        outcome=_outcome(state),
        notes=(*state.paged.values(), *_resized(state), *_failing_copies(state), *notes),
        alerts=_alerts(state, now),
        code=code(state, now),
        evictions=_evicted(state),
        machine_safe=state.safe.step if state.safe is not None else None,
        standbys_wanted=wanted.wanted,
        standbys_why=wanted.why,
        looking=look_views.watching(state, now),
        straggler=look_views.straggler(state),
    )


def _resized(state: State) -> list[str]:
    full, now = state.spec, state.resized
    if full is None or now is None:
        return []
    replicas = f"{now.dp} of {full.dp} data-parallel replicas"
    machines = f"{now.nnodes} of {full.nnodes} machines"
    return [f"it goes on with {replicas}, on {machines}; it grows back when there are more"]


def _layout(state: State) -> LayoutView:
    known = known_layout(state)
    return LayoutView(
        text="" if known.layout is None else known.layout.in_words(),
        source=known.source,
        remarks=known.remarks,
        disagreement=known.disagreement,
    )


def incidents(state: State, now: Seconds) -> IncidentsView:
    """Every incident so far, oldest first, each with the seconds that it cost."""
    return IncidentsView(
        job=state.job.job,
        incidents=tuple(_incident(state, incident, now) for incident in state.incidents),
        seconds=spent(state.account, now),
        ettr=ettr(state.account, now),
        evictions=tuple(_eviction(each) for each in state.evictions),
        evicted=_evicted(state),
    )


def _eviction(known: Eviction) -> EvictionView:
    return EvictionView(
        machine=known.machine,
        host=known.host,
        at=known.at,
        why=known.why,
        incident=known.incident,
        guilty=known.guilty,
        verdict=known.verdict,
        tests=known.tests,
        passed=known.passed,
        returned=known.returned,
    )


def _evicted(state: State) -> EvictionsView:
    guilty = sum(1 for each in state.evictions if each.guilty is True)
    innocent = sum(1 for each in state.evictions if each.guilty is False)
    known = guilty + innocent
    return EvictionsView(
        count=len(state.evictions),
        guilty=guilty,
        innocent=innocent,
        false_share=innocent / known if known else None,
    )


def _incident(state: State, incident: Incident, now: Seconds) -> IncidentView:
    judged = look_views.judged_of(state, incident)
    return IncidentView(
        incident=incident.incident,
        symptom=incident.symptom,
        opened_at=incident.opened_at,
        opened_by=incident.opened_by,
        closed_at=incident.closed_at,
        outcome=incident.outcome,
        cause=incident.cause,
        generation=incident.generation,
        furthest=incident.furthest,
        restored=incident.restored,
        recoveries=incident.recoveries,
        evicted=tuple(incident.evicted),
        failures=tuple(failure.text for failure in incident.failures),
        seconds=spent(state.account, now, incident=incident.incident),
        planned=incident.planned,
        version=name_of(state, incident.version),
        rungs=tuple(_rung(taken) for taken in incident.rungs),
        verdict="" if judged is None else judged.verdict,
        group="" if judged is None else look_views.group_of(judged),
    )


def _rung(taken: RungTaken) -> RungView:
    return RungView(
        rung=taken.rung,
        generation=taken.generation,
        failure=taken.failure,
        why=taken.why,
        at=taken.at,
        action=taken.action,
    )


def _machine(state: State, machine: Machine) -> MachineView:
    node_rank = machine.node_rank
    ranks = () if node_rank is None else tuple(map(Rank, state.job.ranks_of(node_rank)))
    condition, why = _condition(machine)
    return MachineView(
        machine=machine.machine,
        host=machine.host,
        address=machine.address,
        node_rank=node_rank,
        ranks=ranks,
        condition=condition,
        why=why,
    )


def _alerts(state: State, now: Seconds) -> tuple[AlertView, ...]:
    standing = [
        _alert(machine, noted, now)
        for name in state.alerted
        if usable(machine := state.machines[name])
        for noted in machine.alerts
        if noted.cleared_at is None
    ]
    return tuple(sorted(standing, key=lambda view: (_GRAVEST.index(view.verdict), view.since)))


def _alert(machine: Machine, noted: Noted, now: Seconds) -> AlertView:
    result = noted.alert.result
    return AlertView(
        machine=machine.machine,
        check=result.check,
        item=result.item,
        verdict=result.verdict,
        counts=result.counts,
        why=result.why,
        do=result.do,
        source=noted.alert.source,
        since=noted.since,
        age_s=max(0.0, now - noted.since),
    )


def _condition(machine: Machine) -> tuple[str, str]:
    if machine.evicted:
        return "evicted", machine.evicted
    if machine.released:
        return "released", ""
    if machine.lost:
        return "lost", machine.lost
    if not machine.connected:
        return "silent", ""
    return ("standby" if machine.node_rank is None else "member"), ""


def _outcome(state: State) -> OutcomeView | None:
    finish = state.finish
    if finish is None:
        return None
    return OutcomeView(
        outcome=finish.outcome, exit_code=finish.exit_code, why=finish.why, detail=finish.detail
    )
