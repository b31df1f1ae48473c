"""Folds decisions into the state: what an action says becomes what the core holds to be decided.

Called by core/controller.py with every action that rules.py returned, and, in a replay, with every
action that the journal recorded: so a newer version that would decide differently still arrives at
the state that its predecessor left. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from everstep.actions import (
    BackUpStep,
    BeginGeneration,
    CloseIncident,
    CollectStacks,
    ControllerAction,
    EndController,
    EvictMachine,
    FinishJob,
    GiveVerdict,
    HoldVersion,
    InjectFault,
    JudgeStacks,
    OpenIncident,
    PageHuman,
    PersistStep,
    ProbeMachine,
    PublishStep,
    RefuseUpdate,
    ReleaseMachine,
    RequestMachines,
    ResizeJob,
    ReturnMachine,
    SendStacks,
    StartRanks,
    StopRanks,
    SwitchCode,
    TakeRung,
    TestMachine,
    TryVersion,
    WakeStandby,
)
from everstep.core.accusers import lies_in
from everstep.core.alerts import people_told, proven
from everstep.core.ettr import Owner
from everstep.core.evidence import judged
from everstep.core.layouts import LAYOUT
from everstep.core.looked import collect_stacks, judge_stacks, send_stacks, stop_watching
from everstep.core.probing import forget_probe, forget_probes, probe_machine
from everstep.core.quarantine import (
    evicted,
    give_verdict,
    release_machine,
    return_machine,
    stop_ranks,
    test_machine,
)
from everstep.core.resize import resize_job
from everstep.core.restore import safe_on_local_disks
from everstep.core.slowdown import ranks_start
from everstep.core.spreading import hold_version
from everstep.core.stalls import ranks_start as stalls_ranks_start
from everstep.core.state import (
    Backup,
    Expelled,
    Incident,
    Persist,
    Phase,
    RungTaken,
    State,
)
from everstep.core.trials import try_version
from everstep.core.versions import (
    code_starts,
    generation_ends,
    people_heard,
    refuse_update,
    switch_code,
)
from everstep.model import NO_STEP, Published, Seconds


def commit(state: State, action: ControllerAction, now: Seconds) -> None:
    """Take note of one decision."""
    _COMMITTERS[type(action)](state, action, now)


def _open_incident(state: State, action: OpenIncident, now: Seconds) -> None:
    incident = Incident(
        incident=action.incident,
        symptom=action.symptom,
        opened_at=now,
        opened_by=action.id,
        generation=state.generation,
        furthest=state.furthest,
        version=state.version,
        planned=action.planned,
        failures=list(state.failures),
    )
    state.incidents.append(incident)
    last = state.account.segments[-1]
    if last.owner is Owner.DETECTING and not last.incident:
        last.incident = action.incident


def _close_incident(state: State, action: CloseIncident, now: Seconds) -> None:
    incident = state.incident
    if incident is not None and incident.incident == action.incident:
        incident.closed_at = now
        proven(state, now)
        incident.outcome = action.why
        # Recoveries are forgotten when steps advance (observe.py), not by time alone: a script that
        # reports no steps and dies every few minutes would be started again for ever.
        state.proven = True


def _begin_generation(state: State, action: BeginGeneration, now: Seconds) -> None:
    """Everything older is void: its failures are the open incident's from here on."""
    incident = state.incident
    generation_ends(state, now)
    stop_watching(state)
    state.planned = action.planned
    if incident is not None:
        known = {failure.event for failure in incident.failures}
        incident.failures.extend(f for f in state.failures if f.event not in known)
        if state.finish is None:
            incident.recoveries += 1
            _count_restart(state, now)
    state.early_exits = [rank for rank, status in state.exits.items() if status.ok]
    state.generation = action.generation
    state.paged.clear()
    state.abnormal.clear()
    _settle_disk(state)
    state.failures.clear()
    state.exits.clear()
    state.awaiting.clear()
    state.running_since = state.first_exit_at = None
    state.finished_by_all = state.finished_by_one = NO_STEP
    forget_probes(state)
    state.backup = None
    state.backup_after = state.safe.step if state.safe is not None else NO_STEP
    state.backup_not_before = now
    void = (StopRanks, StartRanks, PersistStep, BackUpStep)
    for key in [k for k, a in state.outstanding.items() if isinstance(a, void)]:
        del state.outstanding[key]
    state.local_disk.persist = None
    if state.disk.persist is not None and not state.disk.persist.publishing:
        state.disk.persist = None
    for machine in state.machines.values():
        machine.survived, machine.not_freed = (), ""
    if state.finish is None:
        _enter(state, Phase.STOPPING, now)
    else:
        state.ending_stopped = True


def _count_restart(state: State, now: Seconds) -> None:
    """For the guards; but not what people wanted."""
    if state.planned is None:
        nothing_failed = state.full and not state.failures
        (state.stops if nothing_failed else state.recoveries).append(now)


def _settle_disk(state: State) -> None:
    """What was not complete when a generation ended does not count."""
    state.disk.after = max((p.step for p in state.published), default=NO_STEP)
    state.disk.begun = state.disk.after


def _enter(state: State, phase: Phase, now: Seconds) -> None:
    state.phase = phase
    state.phase_since = now


def _take_rung(state: State, action: TakeRung, now: Seconds) -> None:
    incident = state.incident
    if incident is not None and incident.incident == action.incident:
        taken = RungTaken(
            rung=action.rung,
            generation=state.generation,
            failure=action.failure,
            version=state.version,
            at=now,
            action=action.id,
            why=action.why,
        )
        incident.rungs.append(taken)


def _stop_ranks(state: State, action: StopRanks, now: Seconds) -> None:
    if state.machines[action.machine].evicted:
        stop_ranks(state, action, now)
    else:
        _await(state, action, now)


def _await(state: State, action: StopRanks | StartRanks, now: Seconds) -> None:
    state.outstanding[action.id] = action
    state.awaiting[action.machine] = action.id
    state.machines[action.machine].ordered_at = now


def _start_ranks(state: State, action: StartRanks, now: Seconds) -> None:
    """The first of a generation's orders also fixes what the history is from here on."""
    _await(state, action, now)
    state.machines[action.machine].start_ordered = state.last_started = action.generation
    if state.phase is not Phase.STARTING:
        state.restores.clear()
    state.restores |= dict(action.restores)
    if state.phase is Phase.STARTING:
        return
    _settle_history(state)
    _settle_evidence(state)
    ranks_start(state)
    stalls_ranks_start(state)
    code_starts(state, now)
    _enter(state, Phase.STARTING, now)
    state.progress_at = now
    state.restored, state.restored_generation = action.restore, action.restore_generation
    chosen = Published(step=action.restore, generation=action.restore_generation)
    state.published = [p for p in state.published if p.step < action.restore or p == chosen]
    _settle_disk(state)
    for machine in state.machines.values():
        machine.local_disk = tuple(c for c in machine.local_disk if c.step <= action.restore)
    state.local_disk.after = state.local_disk.begun = safe_on_local_disks(state)
    if state.safe is not None and state.safe.step > action.restore:
        state.safe = None
        state.single = False
        state.backup_after = NO_STEP
    if state.incident is not None:
        state.incident.restored = action.restore


def _settle_evidence(state: State) -> None:
    """What was found speaks about the failure that is being recovered from, not the next one."""
    found, incident = judged(state), state.incident
    if incident is not None and found is not None:
        incident.rule = found.rule
        lately = [each.machine for each in state.expelled if each.at >= state.phase_since]
        if incident.cause not in {state.machines[name].evicted for name in lately}:
            incident.cause = found.sentence
    state.evidence.clear()


def _settle_history(state: State) -> None:
    """Every machine said where its ranks were when they stopped: now it is known what was lost.

    If no machine is left that could say so, the newest progress report has to do.
    """
    incident = state.incident
    if incident is None:
        return
    told = [m for m in state.members() if m.finished > NO_STEP]
    finished, finished_at = state.furthest, state.progress_at
    if told:
        finished = min(m.finished for m in told)
        finished_at = max(m.finished_at for m in told if m.finished == finished)
        state.proven = state.proven or finished > state.restored
    state.furthest = max(state.furthest, finished)
    incident.furthest = max(incident.furthest, finished)
    # One step was cut off; after that, ranks only waited for somebody to notice.
    if state.step_s is not None:
        state.account.carve(Owner.DETECTING, finished_at + state.step_s, incident.incident)
    state.account.carve(Owner.RECOMPUTING, finished_at, incident.incident)
    for machine in told:
        machine.finished = NO_STEP


def _persist_step(state: State, action: PersistStep, now: Seconds) -> None:
    state.outstanding[action.id] = action
    tier = state.tier(local_disk=action.local_disk)
    if tier.persist is None:
        tier.persist = Persist(step=action.step, generation=action.generation, awaiting={})
        tier.begun, tier.begun_at = action.step, now
    tier.persist.awaiting[action.machine] = action.id


def _back_up_step(state: State, action: BackUpStep, now: Seconds) -> None:
    state.outstanding[action.id] = action
    if state.backup is None:
        state.backup = Backup(
            step=action.step, generation=action.generation, awaiting={}, begun_at=now
        )
        state.backup_after = action.step
    state.backup.awaiting[action.machine] = action.id


def _publish_step(state: State, action: PublishStep, now: Seconds) -> None:
    del now
    state.outstanding[action.id] = action
    if state.disk.persist is not None:
        state.disk.persist.publishing = action.id


def _inject_fault(state: State, action: InjectFault, now: Seconds) -> None:
    del now
    state.outstanding[action.id] = action
    del state.faults[0], state.fault_events[0]


def _release_machine(state: State, action: ReleaseMachine, now: Seconds) -> None:
    if state.finish is not None and not state.ending_ready:
        state.ending_ready = True
        state.phase_since = now
        state.awaiting.clear()
    state.outstanding[action.id] = action
    release_machine(state, action)
    if state.ending_ready:
        state.awaiting[action.machine] = action.id


def _evict_machine(state: State, action: EvictMachine, now: Seconds) -> None:
    """Its position is free; what it still owed is not waited for."""
    machine = state.machines[action.machine]
    evicted(state, action, now)
    machine.evicted = action.why
    state.alerted.pop(action.machine, None)
    state.silent.pop(action.machine, None)
    forget_probe(state, action.machine)
    state.awaiting.pop(action.machine, None)
    for key, order in list(state.outstanding.items()):
        if getattr(order, "machine", None) == action.machine:
            del state.outstanding[key]
    for tier in (state.disk, state.local_disk):
        if tier.persist is not None and action.machine in tier.persist.awaiting:
            tier.persist = None
    if machine.node_rank is not None:
        state.positions.pop(machine.node_rank, None)
        machine.was, machine.node_rank = machine.node_rank, None
        state.single = state.safe is not None
        if state.incident is not None and action.accused:
            state.incident.cause = action.why
    if state.incident is not None:
        state.incident.evicted.append(action.machine)
    if action.accused:
        _expel(state, action, now)


def _expel(state: State, action: EvictMachine, now: Seconds) -> None:
    oldest = now - state.job.policy.accusers_within_s
    state.expelled = [each for each in state.expelled if each.at > oldest]
    state.expelled.append(Expelled(machine=action.machine, at=now, unit=action.unit))
    if lies_in(state.machines[action.machine], action.unit):  # a parallel group is no such place
        state.bad_units[action.unit] = None


def _wake_standby(state: State, action: WakeStandby, now: Seconds) -> None:
    del now
    state.machines[action.machine].node_rank = action.node_rank
    state.positions[action.node_rank] = action.machine


def _request_machines(state: State, action: RequestMachines, now: Seconds) -> None:
    del now
    state.outstanding[action.id] = action
    state.requested += action.count


def _page_human(state: State, action: PageHuman, now: Seconds) -> None:
    del now
    state.paged[action.about] = action.why
    people_told(state, action.about)
    people_heard(state, action.about)
    if action.about == LAYOUT:
        state.told_of_layout = action.why


def _finish_job(state: State, action: FinishJob, now: Seconds) -> None:
    state.finish = action
    stop_watching(state)
    state.account.end(now)
    _enter(state, Phase.ENDING, now)


def _end_controller(state: State, action: EndController, now: Seconds) -> None:
    del action
    _enter(state, Phase.ENDED, now)


_COMMITTERS: dict[type[ControllerAction], Callable[[State, Any, Seconds], None]] = {
    OpenIncident: _open_incident,
    CloseIncident: _close_incident,
    TakeRung: _take_rung,
    CollectStacks: collect_stacks,
    SendStacks: send_stacks,
    JudgeStacks: judge_stacks,
    SwitchCode: switch_code,
    RefuseUpdate: refuse_update,
    HoldVersion: hold_version,
    TryVersion: try_version,
    TestMachine: test_machine,
    GiveVerdict: give_verdict,
    ReturnMachine: return_machine,
    BeginGeneration: _begin_generation,
    StopRanks: _stop_ranks,
    StartRanks: _start_ranks,
    PersistStep: _persist_step,
    ProbeMachine: probe_machine,
    BackUpStep: _back_up_step,
    PublishStep: _publish_step,
    InjectFault: _inject_fault,
    ReleaseMachine: _release_machine,
    EvictMachine: _evict_machine,
    WakeStandby: _wake_standby,
    ResizeJob: resize_job,
    RequestMachines: _request_machines,
    PageHuman: _page_human,
    FinishJob: _finish_job,
    EndController: _end_controller,
}
