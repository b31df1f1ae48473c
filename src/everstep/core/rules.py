"""The policies: what to do next, as an ordered list of small pure rules.

core/controller.py asks decide() after every event, commits what it returns, and asks again until
nothing is left to decide. The first rule with something to say wins, so the order of RULES is the
order of importance, and each rule may rely on those above it having nothing to say.

How a broken generation becomes a new one, in rules: open_incident names the symptom; refuse_to_loop
lets the guards speak; evict_lost frees the positions of lost machines; begin_generation fences off
the old ranks and has them stopped; take_rung says what this recovery does about it (ladder.py);
put_in_place changes the code; wake_standbys fills free positions; stop_new_members proves the
newcomers clean; start_ranks restores the newest complete step and starts everybody; close_incident
waits for proof.

Every rule says why, with its numbers: the sentence goes to the journal and to people as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from msgspec.structs import replace

from everstep.actions import (
    BeginGeneration,
    CloseIncident,
    ControllerAction,
    EvictMachine,
    FinishJob,
    InjectFault,
    OpenIncident,
    Outcome,
    PageHuman,
    RequestMachines,
    Rung,
    StartRanks,
    StopRanks,
    SwitchCode,
    TakeRung,
    WakeStandby,
)
from everstep.core import ladder, looking, patience, resize, sources, spreading, trials, updates
from everstep.core.deciding import Deciding, Planned
from everstep.core.ending import end_of_job
from everstep.core.evicting import (
    but,
    by_trust,
    evict_accused,
    evict_standbys,
    stop_for,
    story,
    tell_of_accused,
    tell_of_alerts,
)
from everstep.core.evidence import judged
from everstep.core.failures import failure_class
from everstep.core.faults import target_of
from everstep.core.guards import give_up
from everstep.core.keeping import back_up_step
from everstep.core.layouts import LAYOUT, known_layout
from everstep.core.probing import probe_silent
from everstep.core.quarantine import treat_evicted
from everstep.core.restore import SCRATCH, choose_from, only_spoiled
from everstep.core.standby import wanted_standbys
from everstep.core.state import Machine, Phase, State
from everstep.core.tiers import persist_step, publish_step
from everstep.model import (
    Generation,
    MachineId,
    NodeRank,
    Seconds,
    Step,
)


def decide(state: State, now: Seconds, already: int) -> list[ControllerAction]:
    """What the first rule with something to say wants done; empty when all are content."""
    if state.spec is None or state.phase is Phase.ENDED:
        return []
    question = Deciding(state, now, already)
    for rule in RULES if state.finish is None else ENDING_RULES:
        actions = rule(question)
        if actions:
            return actions
    return []


# --- people --------------------------------------------------------------------------------------


def inject_faults(d: Deciding) -> list[ControllerAction]:
    if not d.state.faults:
        return []
    request = d.state.faults[0]
    target = target_of(d.state, request)
    return [
        InjectFault(
            id=d.id(),
            cause=str(d.state.fault_events[0]),
            why=f"somebody asked for {request.fault}",
            fault=request.fault,
            machine=target.machine,
            rank=target.rank,
        )
    ]


def stop_on_request(d: Deciding) -> list[ControllerAction]:
    if not d.state.stop_by:
        return []
    return [
        FinishJob(
            id=d.id(),
            cause=d.event,
            why=f"stopped by {d.state.stop_by} after step {d.state.furthest}",
            outcome=Outcome.STOPPED,
            exit_code=130,
        )
    ]


def finish_when_done(d: Deciding) -> list[ControllerAction]:
    state = d.state
    if state.failures or len(state.exits) < state.job.world_size:
        return []
    return [
        FinishJob(
            id=d.id(),
            cause=d.event,
            why=f"all {state.job.world_size} ranks ended with exit code 0",
            outcome=Outcome.FINISHED,
            exit_code=0,
        )
    ]


def tell_of_early_exits(d: Deciding) -> list[ControllerAction]:
    """Not a reason to stop anything: a last evaluation on one rank may take as long as it likes."""
    moment = patience.early_exit_at(d.state)
    if moment is None or d.now < moment:
        return []
    over = ", ".join(map(str, sorted(d.state.exits)))
    return [
        PageHuman(
            id=d.id(),
            cause=d.event,
            why=f"rank {over} ended with exit code 0, the others still run and nothing advanced for"
            f" {d.state.job.policy.early_exit_s:g} s; they are left alone",
            about="early exit",
        )
    ]


def tell_of_silence(d: Deciding) -> list[ControllerAction]:
    """All machines silent at once are a network's doing, or their owner's who will say so."""
    moment = patience.unheard_at(d.state)
    if moment is None or d.now < moment:
        return []
    return [
        PageHuman(
            id=d.id(),
            cause=d.event,
            why=f"no machine of the job is heard of for {d.state.job.policy.silent_s:g} s, and none"
            " is known to be lost: it may train on, so nothing is started in its place until one"
            " of them is heard of again",
            about="nobody heard",
        )
    ]


def tell_of_proof(d: Deciding) -> list[ControllerAction]:
    """Everybody is ready, but of the machines that ran the old ranks none has proven them gone."""
    state = d.state
    moment = patience.unproven_at(state)
    if moment is None or d.now < moment:
        return []
    why = (
        f"no machine that ran generation {state.last_started} has proven its ranks gone, so nothing"
        " is started in their place until one has, or its owner says that it is gone"
    )
    return [PageHuman(id=d.id(), cause=d.event, why=why, about=patience.OLD_RANKS)]


def tell_of_layout(d: Deciding) -> list[ControllerAction]:
    """Sources of the layout that disagree: backups may lie where they are lost with their owner."""
    why = known_layout(d.state).disagreement
    if not why or why == d.state.told_of_layout:
        return []
    return [PageHuman(id=d.id(), cause=d.event, why=why, about=LAYOUT)]


# --- from a symptom to a new generation ----------------------------------------------------------


def open_incident(d: Deciding) -> list[ControllerAction]:
    state = d.state
    if state.incident is not None or state.phase is Phase.GATHERING:
        return []
    symptom = _symptom(d)
    planned = None if symptom else _planned(d)
    if planned is not None:
        symptom = planned.why
    if not symptom:
        return []
    number = len(state.incidents) + 1
    return [
        OpenIncident(
            id=d.id(),
            cause=d.event,
            why=symptom,
            incident=f"incident-{number}",
            symptom=symptom,
            planned=planned is not None,
        )
    ]


def _planned(d: Deciding) -> Planned | None:
    """What ranks that are well are stopped for, if they are."""
    state = d.state
    if state.broken or state.phase not in (Phase.STARTING, Phase.RUNNING):
        return None
    return updates.restart_for(d) or resize.restart_for(d)


def _symptom(d: Deciding) -> str:
    """Why the generation cannot go on, or must not; empty if it can."""
    state = d.state
    if state.failures:
        return state.failures[0].text
    lost = [x for x in patience.lost_machines(state, d.now) if x[0].node_rank is not None]
    if lost:
        return f"machine {lost[0][0].machine} counts as lost: {lost[0][1]}"
    doomed = stop_for(d)
    return story(doomed) if doomed is not None else looking.symptom(d)


def refuse_to_loop(d: Deciding) -> list[ControllerAction]:
    state = d.state
    if not state.broken or _settling(d):
        return []
    verdict = give_up(state, d.now)
    if verdict is None:
        return []
    why = verdict.why
    actions: list[ControllerAction] = []
    if verdict.page:
        tried = ladder.told(state.incident) if state.incident is not None else ""
        why += f" (tried: {tried})" if tried else ""
        actions += _human(d, why)
        actions.append(
            PageHuman(id=d.id(), cause=d.event, why=why, about="recoveries without progress")
        )
    actions.append(
        FinishJob(
            id=d.id(),
            cause=d.event,
            why=why,
            outcome=Outcome.FAILED,
            exit_code=1,
            detail=verdict.detail,
        )
    )
    return actions


def _human(d: Deciding, why: str) -> list[ControllerAction]:
    incident = d.state.incident
    if incident is None:
        return []
    failure = failure_class(d.state, judged(d.state))
    return [
        TakeRung(
            id=d.id(),
            cause=d.event,
            why=why,
            incident=incident.incident,
            rung=Rung.HUMAN,
            failure=failure,
        )
    ]


def _settling(d: Deciding) -> bool:
    return bool(d.state.failures) and d.now < patience.settled_at(d.state)


def evict_lost(d: Deciding) -> list[ControllerAction]:
    return [
        EvictMachine(
            id=d.id(),
            cause=d.state.incident.opened_by if d.state.incident else d.event,
            why=why,
            machine=machine.machine,
        )
        for machine, why in patience.lost_machines(d.state, d.now)
    ]


def begin_generation(d: Deciding) -> list[ControllerAction]:
    state, incident = d.state, d.state.incident
    first = state.phase is Phase.GATHERING and state.full
    broken = state.broken and not _settling(d)
    doomed = None if first or broken else stop_for(d)
    planned = None if first or broken or doomed is not None else _planned(d)
    if not first and not broken and doomed is None and planned is None:
        return []
    number = Generation(state.generation + 1)
    if first or incident is None:
        why = f"all {state.job.nnodes} machines are here: the job starts"
    else:
        why = f"generation {state.generation} cannot go on: {incident.symptom}"
        if state.failures:
            why = f"generation {state.generation} cannot go on: {state.failures[0].text}"
        elif doomed is not None:
            why = f"generation {state.generation} is stopped: {story(doomed)}"
        elif planned is not None:
            why = f"generation {state.generation} is stopped: {planned.why}"
    begin = BeginGeneration(
        id=d.id(),
        cause=incident.opened_by if incident else d.event,
        why=why,
        generation=number,
        planned=planned.rung if planned is not None else None,
    )
    stops = [_stop(d, machine, begin.id, number) for machine in state.members()]
    if planned is not None:
        save_s = state.job.policy.save_before_stop_s
        stops = [replace(stop, saved_within_s=save_s) for stop in stops]
    return [begin, *stops]


def _stop(d: Deciding, machine: Machine, cause: str, generation: Generation) -> StopRanks:
    return StopRanks(
        id=d.id(),
        cause=cause,
        why=f"ranks older than generation {generation} must be gone before it starts",
        machine=machine.machine,
        generation=generation,
        within_s=d.state.job.policy.gone_within_s,
    )


def take_rung(d: Deciding) -> list[ControllerAction]:
    """Once all have stopped and told, and those that are to blame are gone."""
    state, incident = d.state, d.state.incident
    if state.phase is not Phase.STOPPING or state.awaiting or incident is None:
        return []
    if incident.starts and incident.starts[-1].generation == state.generation:
        return []
    if state.planned is not None:
        why = incident.symptom if incident.planned else "other code, or other machines, came"
        chosen = ladder.Climb(rung=state.planned, failure=str(state.planned), why=why)
    else:
        chosen = ladder.climb(state, incident, d.now)
    taken = TakeRung(
        id=d.id(),
        cause=incident.opened_by,
        why=chosen.why,
        incident=incident.incident,
        rung=chosen.rung,
        failure=chosen.failure,
    )
    if chosen.version is None:
        return [taken]
    switch = SwitchCode(
        id=d.id(),
        cause=taken.id,
        why=chosen.why,
        version=chosen.version,
        previous=state.version,
        rolled_back=True,
    )
    return [taken, switch]


def wake_standbys(d: Deciding) -> list[ControllerAction]:
    state = d.state
    free = [NodeRank(n) for n in range(state.job.nnodes) if n not in state.positions]
    if not free or state.phase not in (Phase.GATHERING, Phase.STOPPING):
        return []
    if state.phase is Phase.GATHERING:
        moment = patience.gathered_at(state)
        if moment is None or d.now < moment:
            return []
    chosen: list[tuple[NodeRank, MachineId]] = []
    for tier in by_trust(state, state.standbys(), d.now):
        taken = {node_rank for node_rank, _ in chosen}
        chosen += assign([n for n in free if n not in taken], tier)
    return [
        WakeStandby(
            id=d.id(),
            cause=d.event,
            why=f"position {node_rank} is free and {machine} is ready{but(state, machine, d.now)}",
            machine=machine,
            node_rank=node_rank,
        )
        for node_rank, machine in sorted(chosen)
    ]


def assign(free: list[NodeRank], standbys: list[Machine]) -> list[tuple[NodeRank, MachineId]]:
    """Positions for standbys: as asked on their command line, or the one that a machine had before
    its eviction, since its memory may hold those shards; else in order of their names.
    """
    left = sorted(standbys, key=lambda machine: _natural(machine.machine))
    chosen: dict[NodeRank, MachineId] = {}
    for machine in list(left):
        wanted = machine.asked if machine.asked is not None else machine.was
        if wanted is not None and wanted in free and wanted not in chosen:
            chosen[wanted] = machine.machine
            left.remove(machine)
    for node_rank in free:
        if node_rank not in chosen and left:
            chosen[node_rank] = left.pop(0).machine
    return sorted(chosen.items())


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts m9 before m10."""
    return [(int(part or 0), text) for text, part in re.findall(r"(\D*)(\d*)", name)]


def stop_new_members(d: Deciding) -> list[ControllerAction]:
    state = d.state
    if state.phase is not Phase.STOPPING:
        return []
    return [
        _stop(d, machine, d.event, state.generation)
        for machine in state.members()
        if machine.stopped_for < state.generation and machine.machine not in state.awaiting
    ]


def start_ranks(d: Deciding) -> list[ControllerAction]:
    state = d.state
    if state.phase is not Phase.STOPPING or state.awaiting or not state.full:
        return []
    if spreading.lacks_code(state) or patience.old_ranks_may_run(state):
        return []
    if d.now < patience.publish_hold_until(state):
        return []
    if state.numeric is not None and only_spoiled(state):
        return _nothing_sound(d, state.numeric.first_bad)
    choice = choose_from(state)
    master = state.members()[0]
    saved = state.job_of(choice.copy)
    other_size = choice.copy != SCRATCH and saved != state.job
    return [
        StartRanks(
            id=d.id(),
            cause=d.event,
            why=choice.why,
            machine=machine.machine,
            generation=state.generation,
            node_rank=node_rank,
            master_addr=master.address,
            master_port=master.store_port,
            restore=choice.copy.step,
            restore_generation=choice.copy.generation,
            fetch=sources.sources(state, choice, node_rank),
            slices=sources.slices(state, choice, node_rank),
            restarts=state.generation - 1,
            version=state.version,
            nnodes=0 if state.resized is None else state.job.nnodes,
            dp=0 if state.resized is None else state.job.dp,
            restore_nnodes=saved.nnodes if choice.restores or other_size else 0,
            restores=sources.restores(state, choice, node_rank),
            compare_through=state.compare_through,
        )
        for node_rank, machine in (
            (n, state.machines[m]) for n, m in sorted(state.positions.items())
        )
    ]


def _nothing_sound(d: Deciding, first_bad: Step) -> list[ControllerAction]:
    """Better no restart than one from step 0, or from numbers that are worth nothing."""
    why = (
        f"training's numbers are bad from step {first_bad} on and no older step is kept: a human"
        " has to choose between an older checkpoint and a start from step 0"
    )
    return [
        PageHuman(id=d.id(), cause=d.event, why=why, about="numbers"),
        FinishJob(
            id=d.id(), cause=d.event, why=why, outcome=Outcome.FAILED, exit_code=1, detail=""
        ),
    ]


def close_incident(d: Deciding) -> list[ControllerAction]:
    state, incident = d.state, d.state.incident
    if incident is None or state.phase is not Phase.RUNNING or state.failures:
        return []
    if state.watching is not None and state.watching.incident == incident.incident:
        return []
    goal = max(incident.furthest, state.restored) + state.job.policy.proven_after_steps
    by_time = patience.proven_at(state)
    if state.finished_by_all >= goal:
        why = f"proven: step {state.finished_by_all} is finished by all ranks, {goal} was needed"
    elif by_time is not None and d.now >= by_time:
        why = f"proven: no failure for {state.job.policy.proven_after_s:g} s"
    else:
        return []
    return [CloseIncident(id=d.id(), cause=d.event, why=why, incident=incident.incident)]


def tell_of_numbers(d: Deciding) -> list[ControllerAction]:
    """A jump or a decline may well be training's own doing: nothing is stopped for it."""
    for event in d.state.abnormal:
        about = f"{event.metric} {event.kind}"
        if about not in d.state.paged:
            why = f"{event.why}; training goes on"
            return [PageHuman(id=d.id(), cause=d.event, why=why, about=about)]
    return []


# --- machines ------------------------------------------------------------------------------------


def request_machines(d: Deciding) -> list[ControllerAction]:
    state = d.state
    assert state.spec is not None
    wanted = state.spec.nnodes + wanted_standbys(state, d.now)
    usable = sum(not m.evicted and not m.released and not m.lost for m in state.machines.values())
    missing = wanted - usable - state.requested
    if missing <= 0:
        return []
    return [
        RequestMachines(
            id=d.id(),
            cause=d.event,
            why=f"{usable} machines are usable and {state.requested} on their way, {wanted} are"
            " wanted (positions and standbys)",
            count=missing,
        )
    ]


def close_at_end(d: Deciding) -> list[ControllerAction]:
    incident, finish = d.state.incident, d.state.finish
    if incident is None or finish is None:
        return []
    why = f"the job ended ({finish.outcome}): {finish.why}"
    return [CloseIncident(id=d.id(), cause=finish.id, why=why, incident=incident.incident)]


Rule = Callable[[Deciding], list[ControllerAction]]

RULES: tuple[Rule, ...] = (
    inject_faults,
    stop_on_request,
    finish_when_done,
    open_incident,
    refuse_to_loop,
    spreading.give_up_without_code,
    evict_lost,
    evict_accused,
    evict_standbys,
    tell_of_accused,
    looking.look,
    begin_generation,
    take_rung,
    updates.put_in_place,
    resize.resize,
    wake_standbys,
    stop_new_members,
    start_ranks,
    close_incident,
    publish_step,
    persist_step,
    back_up_step,
    probe_silent,
    trials.try_pending,
    spreading.hold_versions,
    updates.tell,
    tell_of_proof,
    resize.tell_of_shortage,
    tell_of_early_exits,
    tell_of_silence,
    tell_of_layout,
    tell_of_numbers,
    tell_of_alerts,
    request_machines,
    treat_evicted,
)

ENDING_RULES: tuple[Rule, ...] = (close_at_end, end_of_job)
