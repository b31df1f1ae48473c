"""Folds facts into the state: what an event says becomes what the core knows. Decides nothing.

Called by core/controller.py with every event before rules.py is asked. An event may be late,
doubled or about something long gone (another generation, an evicted machine): then it changes
nothing but the books about that thing. No event raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from everstep.actions import (
    BackUpStep,
    ControllerAction,
    HoldVersion,
    InjectFault,
    PersistStep,
    ProbeMachine,
    PublishStep,
    ReleaseMachine,
    RequestMachines,
    SendStacks,
    StartRanks,
    StopRanks,
    TestMachine,
    TryVersion,
)
from everstep.core.alerts import alert_cleared, alert_raised, count_event, machine_came
from everstep.core.copied import (
    backup_failed,
    persist_failed,
    step_backed_up,
    step_persisted,
    step_published,
)
from everstep.core.ettr import Owner
from everstep.core.evidence import evidence_found
from everstep.core.guards import UNUSABLE
from everstep.core.looked import new_term as looked_new_term
from everstep.core.looked import stacks_requested, stacks_sent, stacks_taken
from everstep.core.numeric import bad_numbers, got_past
from everstep.core.probing import forget_probe, forget_probes, machine_probed
from everstep.core.quarantine import machine_came as evicted_machine_came
from everstep.core.quarantine import machine_tested, new_term
from everstep.core.resize import machines_requested
from everstep.core.restore import history_goes_on
from everstep.core.slowdown import speed_fell, step_took
from everstep.core.slowness import straggler_seen
from everstep.core.spreading import joined
from everstep.core.stalls import activity_seen, member_heard, progress_seen
from everstep.core.standby import standbys_at_first
from everstep.core.state import (
    Failure,
    FailureKind,
    Machine,
    Phase,
    State,
)
from everstep.core.trials import new_term as trials_new_term
from everstep.core.trials import version_held, version_not_held, version_tried
from everstep.core.versions import (
    job_came,
    losses_compared,
    rollback_requested,
    steps_done,
    update_requested,
)
from everstep.events import (
    AlertCleared,
    AlertRaised,
    BackupFailed,
    ControllerEvent,
    ControllerStarted,
    EvidenceFound,
    FaultInjected,
    FaultRequested,
    GroupsSeen,
    JobSubmitted,
    MachineJoined,
    MachineLost,
    MachineProbed,
    MachineReady,
    MachineReleased,
    MachineSilent,
    MachinesRequested,
    MachineTested,
    MetricAbnormal,
    PersistFailed,
    RankExited,
    RanksStarted,
    RanksStopped,
    RanksSurvived,
    RollbackRequested,
    StartFailed,
    StepBackedUp,
    StepPersisted,
    StepProgress,
    StepPublished,
    StopRequested,
    TimerFired,
    UpdateRequested,
    VersionHeld,
    VersionNotHeld,
    VersionTried,
)
from everstep.model import NO_STEP, Copy, MachineId, Published, Rank, Seconds
from everstep.sightings import (
    ActivitySeen,
    LossesCompared,
    StacksRequested,
    StacksSent,
    StacksTaken,
    StragglerSeen,
)


def observe(state: State, event: ControllerEvent, now: Seconds) -> None:
    """Take note of one fact. `state.seq` is already the event's journal number."""
    if isinstance(event, JobSubmitted):
        _job_submitted(state, event, now)
    elif state.spec is not None and _answers_its_order(state, event):
        count_event(state, now)
        _OBSERVERS[type(event)](state, event, now)


def _answers_its_order(state: State, event: ControllerEvent) -> bool:
    """False for an answer of the wrong kind or from the wrong machine: its order stays open."""
    order = state.outstanding.get(getattr(event, "action", ""))
    if order is None:
        return True
    answerer = getattr(event, "machine", None)
    right = answerer is None or answerer == getattr(order, "machine", None)
    return right and isinstance(order, _ORDER_OF[type(event)])


def _job_submitted(state: State, event: JobSubmitted, now: Seconds) -> None:
    state.spec = event.spec
    state.published = list(event.published)
    state.inherited = list(event.published)
    state.requested = event.spec.nnodes + standbys_at_first(event.spec)
    state.phase_since = state.progress_at = now
    state.account.switch(Owner.WAITING, now)
    job_came(state, now)
    if event.published:
        state.disk.after = state.disk.begun = event.published[-1].step
    state.disk.begun_at = state.local_disk.begun_at = now


def _controller_started(state: State, event: ControllerStarted, now: Seconds) -> None:
    """A new term: no agent is connected to it yet, and every patience starts anew."""
    state.term = event.term
    forget_probes(state)
    new_term(state, now)
    trials_new_term(state, now)
    looked_new_term(state, now)
    for machine in state.machines.values():
        machine.ordered_at = now
        if machine.connected:
            _fell_silent(state, machine, now)
    for name in state.silent:
        state.machines[name].silent_since = now
    if state.phase is not Phase.RUNNING:
        state.phase_since = now


def _stop_requested(state: State, event: StopRequested, now: Seconds) -> None:
    del now
    state.stop_by = state.stop_by or event.by


def _fault_requested(state: State, event: FaultRequested, now: Seconds) -> None:
    del now
    state.faults.append(event)
    state.fault_events.append(state.seq)


def _nothing(state: State, event: ControllerEvent, now: Seconds) -> None:
    """The fact matters only as an answer, or only as a moment at which rules are asked."""
    del now
    action = getattr(event, "action", None)
    if action is not None:
        state.outstanding.pop(action, None)


# --- machines -------------------------------------------------------------------------------------


def _machine_joined(state: State, event: MachineJoined, now: Seconds) -> None:
    machine = state.machines.get(event.machine)
    new, restarted = machine is None, machine is not None and machine.agent != event.agent
    if machine is None:
        machine = Machine(
            machine=event.machine, agent=event.agent, address=event.address, host=event.host
        )
        state.machines[event.machine] = machine
        state.requested = max(0, state.requested - 1)
    evicted_machine_came(state, machine, new=new, restarted=restarted)
    if machine.node_rank is not None and not any(m.connected for m in state.members()):
        state.heard_since = now
    machine.agent, machine.address, machine.host = event.agent, event.address, event.host
    machine.asked = event.node_rank
    machine.connected = True
    machine.copies, machine.backups = event.copies, event.backups
    machine.local_disk = event.local_disk
    machine.shard_port = event.shard_port
    machine.shard_address = event.shard_address or event.address
    joined(state, machine, event.versions)
    machine.ready = event.ready
    # Booted anew, it knows nothing of what it proved, and is asked again before ranks start.
    machine.stopped_for = min(machine.stopped_for, event.generation)
    machine_came(state, machine, event, now)
    forget_probe(state, event.machine)
    if event.machine in state.silent and machine.node_rank is not None:
        member_heard(state, now)
    state.silent.pop(event.machine, None)
    if state.gather_from is None and len(state.standbys()) >= state.job.nnodes:
        state.gather_from = now
    running = state.phase in (Phase.STARTING, Phase.RUNNING)
    if running:
        _reconcile(state, machine, event, now)


def _reconcile(state: State, machine: Machine, event: MachineJoined, now: Seconds) -> None:
    """Compare what the machine says of its ranks with what the books say.

    A machine that has not answered StartRanks yet is sent it again, so it may well lack ranks; but
    those that ended have ended, and one that has all of them has answered: the time for that may be
    over, and it would be evicted for what it has done long ago.
    """
    if machine.node_rank is None:
        return
    started = machine.started_for == state.generation
    said = {status.rank: status for status in event.ranks if status.generation == state.generation}
    for rank in map(Rank, state.job.ranks_of(machine.node_rank)):
        status = said.get(rank)
        if status is None and started and rank not in state.exits:
            text = f"{machine.machine} came back without rank {rank}"
            _fail(state, _failure(state, now, text, FailureKind.EXITED, machine.machine))
        elif status is not None and status.exit is not None:
            exited = RankExited(
                machine=machine.machine,
                generation=state.generation,
                rank=rank,
                exit=status.exit,
            )
            _rank_exited(state, exited, now)
    order = state.awaiting.get(machine.machine)
    if order is not None and len(said) == state.job.nproc_per_node:
        answer = RanksStarted(machine=machine.machine, action=order, generation=state.generation)
        _ranks_started(state, answer, now)


def _machine_silent(state: State, event: MachineSilent, now: Seconds) -> None:
    machine = state.machines.get(event.machine)
    if machine is not None and machine.connected and machine.agent == event.agent:
        _fell_silent(state, machine, now)


def _fell_silent(state: State, machine: Machine, now: Seconds) -> None:
    machine.connected = False
    machine.silent_since = now
    if not machine.evicted and not machine.released:
        state.silent[machine.machine] = None


def _machine_lost(state: State, event: MachineLost, now: Seconds) -> None:
    machine = state.machines.get(event.machine)
    if machine is None:
        _lost_before_it_joined(state, event)
        return
    if machine.lost or machine.released:
        return
    machine.lost = event.witness
    _gone(state, machine)
    state.alerted.pop(event.machine, None)
    if machine.connected:
        _fell_silent(state, machine, now)
    if machine.node_rank is not None:
        text = f"machine {machine.machine} is lost: {event.witness}"
        _fail(state, _failure(state, now, text, FailureKind.LOST, machine.machine))


def _failure(
    state: State, now: Seconds, text: str, kind: FailureKind, machine: MachineId
) -> Failure:
    return Failure(event=state.seq, at=now, text=text, kind=kind, machine=machine)


def _lost_before_it_joined(state: State, event: MachineLost) -> None:
    """It is on its way no more, and whoever is told of it again must know that."""
    state.machines[event.machine] = Machine(
        machine=event.machine,
        agent="",
        address="",
        host="",
        connected=False,
        lost=event.witness,
    )
    state.requested = max(0, state.requested - 1)


def _machine_ready(state: State, event: MachineReady, now: Seconds) -> None:
    del now
    machine = state.machines.get(event.machine)
    if machine is not None:
        machine.ready = True


def _machine_released(state: State, event: MachineReleased, now: Seconds) -> None:
    del now
    state.outstanding.pop(event.action, None)
    state.awaiting.pop(event.machine, None)
    machine = state.machines.get(event.machine)
    if machine is not None:
        _gone(state, machine)
        machine.released = True
        state.alerted.pop(event.machine, None)
        state.silent.pop(event.machine, None)


# --- ranks ----------------------------------------------------------------------------------------


def _gone(state: State, machine: Machine) -> None:
    """Ranks of this machine are known not to run: what it was a part of cannot advance."""
    if machine.start_ordered == state.last_started:
        state.dead_through = state.last_started


def _answered(state: State, name: MachineId, action: str) -> Machine | None:
    """The machine, if this is the answer that the current phase waits for from it.

    Or that of an evicted one: it is waited for by nobody, but proves its ranks gone all the same.
    """
    ordered = state.outstanding.pop(action, None) is not None
    machine = state.machines.get(name)
    if machine is not None and machine.evicted and ordered:
        return machine
    if state.awaiting.get(name) != action:
        return None
    del state.awaiting[name]
    return machine


def _ranks_stopped(state: State, event: RanksStopped, now: Seconds) -> None:
    machine = _answered(state, event.machine, event.action)
    if machine is not None:
        if event.generation > machine.start_ordered:
            _gone(state, machine)
        machine.survived, machine.not_freed = (), ""
        machine.stopped_for = event.generation
        machine.store_port = event.store_port
        machine.copies, machine.backups = event.copies, event.backups
        machine.local_disk = event.local_disk
        # A machine that returned may still show what its ranks did long ago.
        lately = machine.start_ordered == state.last_started
        if lately and event.finished > state.restored:
            history_goes_on(state)
        machine.finished = event.finished if lately else NO_STEP
        machine.finished_at = now - max(0.0, event.finished_age_s)


def _ranks_survived(state: State, event: RanksSurvived, now: Seconds) -> None:
    del now
    machine = _answered(state, event.machine, event.action)
    if machine is not None:
        _gone(state, machine)  # killed, only not buried
        machine.survived, machine.not_freed = event.pids, event.reason


def _ranks_started(state: State, event: RanksStarted, now: Seconds) -> None:
    machine = _answered(state, event.machine, event.action)
    if machine is None:
        return
    machine.started_for = event.generation
    if state.phase is Phase.STARTING and not state.awaiting:
        state.phase = Phase.RUNNING
        state.phase_since = state.running_since = now


def _start_failed(state: State, event: StartFailed, now: Seconds) -> None:
    machine = _answered(state, event.machine, event.action)
    if machine is not None and event.generation == state.generation:
        text = f"{event.machine} could not start its ranks: {event.reason}"
        _fail(state, _failure(state, now, text, FailureKind.NOT_STARTED, event.machine))


def _rank_exited(state: State, event: RankExited, now: Seconds) -> None:
    machine = state.machines.get(event.machine)
    if machine is not None and event.generation == state.last_started:
        _gone(state, machine)
    current = event.generation == state.generation
    if not current or state.phase not in (Phase.STARTING, Phase.RUNNING):
        return
    if event.rank in state.exits or not _owns(state, event.machine, event.rank):
        return
    state.exits[event.rank] = event.exit
    if event.exit.ok:
        state.first_exit_at = state.first_exit_at or now
        return
    text = f"rank {event.rank} on {event.machine} ended with {event.exit}"
    if event.error is not None:
        text += f" ({event.error.kind}: {_first_line(event.error.message)})"
    failure = Failure(
        event=state.seq,
        at=now - max(0.0, event.age_s),
        text=text,
        kind=FailureKind.EXITED,
        machine=event.machine,
        rank=event.rank,
        exit=event.exit,
        error=event.error,
        last_lines=event.last_lines,
    )
    _fail(state, failure)
    if event.error is not None and event.error.kind == UNUSABLE:
        _unusable(state, event)


def _unusable(state: State, event: RankExited) -> None:
    """A rank tried all copies of its shard that it could reach, and has dropped its own. What a
    peer gave it lies with the peer still, who cannot see that it is bad.
    """
    bad = Published(step=state.restored, generation=state.restored_generation)
    state.published = [entry for entry in state.published if entry != bad]
    rank = state.restores.get(event.rank, event.rank)
    copy = Copy(rank=rank, step=bad.step, generation=bad.generation)
    if copy not in state.machines[event.machine].copies:
        state.bad_copies.append(copy)


def _owns(state: State, name: MachineId, rank: Rank) -> bool:
    machine = state.machines.get(name)
    if machine is None or machine.node_rank is None:
        return False
    return rank in state.job.ranks_of(machine.node_rank)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]


def _fail(state: State, failure: Failure, *, dead: bool = True) -> None:
    """The current generation is broken. The time since the fault was spent on detecting it.

    It cannot advance (`dead`), unless its ranks still run, with numbers that are worth nothing.
    """
    if state.phase not in (Phase.STARTING, Phase.RUNNING):
        return
    if dead:
        state.dead_through = state.generation
    if not state.failures:
        incident = state.incident.incident if state.incident else ""
        state.account.switch(Owner.DETECTING, failure.at, incident)
    state.failures.append(failure)


def _step_progress(state: State, event: StepProgress, now: Seconds) -> None:
    if event.generation != state.generation or state.failures:
        return
    if state.phase not in (Phase.STARTING, Phase.RUNNING):
        return
    if event.finished_by_one > state.finished_by_one:
        state.finished_by_one, state.advanced_at = event.finished_by_one, now
        forget_probes(state)
    step_took(state, event.step_s, now)
    progress_seen(state, event, now)
    state.step_s = event.step_s or state.step_s
    state.loss = event.loss
    if event.finished_by_all <= state.finished_by_all:
        return
    if state.finished_by_all == NO_STEP:
        history_goes_on(state)
    state.finished_by_all = event.finished_by_all
    state.progress_at = max(state.progress_at, now - max(0.0, event.age_s))
    _account_progress(state)
    got_past(state, event.finished_by_all)
    if event.finished_by_all > state.furthest:
        steps_done(state, event.finished_by_all - state.furthest, now)
        state.furthest = event.finished_by_all
        state.recoveries.clear()
        state.stops.clear()
        state.proven = True


def _metric_abnormal(state: State, event: MetricAbnormal, now: Seconds) -> None:
    speed_fell(state, event, now)
    failure = bad_numbers(state, event, now)
    if failure is not None:
        _fail(state, failure, dead=False)


def _account_progress(state: State) -> None:
    """Time up to the first new step was restarting; steps up to `furthest` are done again.

    One report covers several steps, so the moments at which those two steps were finished are
    computed back from the time per step.
    """
    step_s = state.step_s or 0.0
    account, lost = state.account, state.furthest > state.restored
    if account.current not in (Owner.TRAINING, Owner.RECOMPUTING):
        # A script that ignores the restored step may well begin before it.
        since_first = max(0, state.finished_by_all - state.restored - 1) * step_s
        first_at = state.progress_at - since_first
        incident = state.incident.incident if state.incident and lost else ""
        account.switch(Owner.RECOMPUTING if lost else Owner.TRAINING, first_at, incident)
    if account.current is Owner.RECOMPUTING and state.finished_by_all >= state.furthest:
        passed_at = state.progress_at - (state.finished_by_all - state.furthest) * step_s
        account.switch(Owner.TRAINING, passed_at)


def _groups_seen(state: State, event: GroupsSeen, now: Seconds) -> None:
    """What was seen in an earlier generation counts until a newer one tells."""
    del now
    if event.generation == state.generation:
        state.seen = event.seen


_ORDER_OF: dict[type[ControllerEvent], type[ControllerAction]] = {
    RanksStopped: StopRanks,
    RanksSurvived: StopRanks,
    RanksStarted: StartRanks,
    StartFailed: StartRanks,
    StepPersisted: PersistStep,
    PersistFailed: PersistStep,
    StepBackedUp: BackUpStep,
    BackupFailed: BackUpStep,
    StepPublished: PublishStep,
    MachineProbed: ProbeMachine,
    VersionHeld: HoldVersion,
    VersionNotHeld: HoldVersion,
    VersionTried: TryVersion,
    MachineTested: TestMachine,
    MachinesRequested: RequestMachines,
    StacksSent: SendStacks,
    FaultInjected: InjectFault,
    MachineReleased: ReleaseMachine,
}
"""What each answer answers."""

Observer = Callable[[State, Any, Seconds], None]

_OBSERVERS: dict[type[ControllerEvent], Observer] = {
    ControllerStarted: _controller_started,
    StopRequested: _stop_requested,
    FaultRequested: _fault_requested,
    UpdateRequested: update_requested,
    RollbackRequested: rollback_requested,
    TimerFired: _nothing,
    MachineJoined: _machine_joined,
    MachineReady: _machine_ready,
    MachineTested: machine_tested,
    VersionHeld: version_held,
    VersionNotHeld: version_not_held,
    VersionTried: version_tried,
    LossesCompared: losses_compared,
    MachineSilent: _machine_silent,
    MachineLost: _machine_lost,
    MachineReleased: _machine_released,
    RanksStopped: _ranks_stopped,
    RanksSurvived: _ranks_survived,
    RanksStarted: _ranks_started,
    StartFailed: _start_failed,
    RankExited: _rank_exited,
    StepProgress: _step_progress,
    GroupsSeen: _groups_seen,
    EvidenceFound: evidence_found,
    AlertRaised: alert_raised,
    AlertCleared: alert_cleared,
    MachineProbed: machine_probed,
    MetricAbnormal: _metric_abnormal,
    StepPersisted: step_persisted,
    PersistFailed: persist_failed,
    StepBackedUp: step_backed_up,
    BackupFailed: backup_failed,
    StepPublished: step_published,
    MachinesRequested: machines_requested,
    FaultInjected: _nothing,
    StacksRequested: stacks_requested,
    StacksTaken: stacks_taken,
    StacksSent: stacks_sent,
    ActivitySeen: activity_seen,
    StragglerSeen: straggler_seen,
}
