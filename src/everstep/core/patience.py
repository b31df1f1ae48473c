"""When patience ends: the one place where waiting is turned into moments in time.

rules.py asks whether a moment has come, ControllerCore.next_deadline() asks for the earliest one
that has not: both through these functions, so a timer never fires without something to decide.
"""

from __future__ import annotations

from collections.abc import Iterator

from everstep.actions import StartRanks, StopRanks
from everstep.core import looking, quarantine, resize, spreading, trials, updates
from everstep.core.evicting import due_later
from everstep.core.probing import given_up, probe_at
from everstep.core.state import Machine, Phase, State
from everstep.model import Seconds

AT_ONCE: Seconds = float("-inf")
NEVER: Seconds = float("inf")
OLD_RANKS = "old ranks"
"""What people are told about: nobody who ran them has proven them gone."""
PUBLISH_WAIT_S: Seconds = 5.0
"""How long a restart waits for a step that is just being published: it is a rename on the shared
file system, and waiting for it saves all steps since the one before."""


def lost_at(state: State, machine: Machine, *, unheard: bool) -> tuple[Seconds, str] | None:
    """When the machine counts as lost if nothing changes, and why; None: nothing speaks for it.

    `unheard` is may_train_unheard(state), asked once for all machines.
    """
    if machine.evicted or machine.released or state.finish is not None:
        return None
    at_once = machine.lost or spreading.lost_without_code(state, machine)
    if at_once:
        return AT_ONCE, at_once
    if machine.left_behind:
        return AT_ONCE, machine.left_behind
    if not machine.connected:
        unreachable = given_up(state, machine)
        if unreachable:
            return AT_ONCE, unreachable
        member = machine.start_ordered == state.last_started
        return None if member and unheard else _silent_until(state, machine)
    return _owes_until(state, machine) if machine.machine in state.awaiting else None


def may_train_unheard(state: State) -> bool:
    """Whether the newest ranks may all be training on, cut off from this controller: none of their
    machines is heard of, and none of them is known to be gone. Nothing may be started in their
    place, so the last silent machine is not given up.

    One machine that is heard of tells whether steps advance and can be stopped; one rank that is
    gone lets no other advance.
    """
    if state.last_started <= state.dead_through:
        return False
    return not any(machine.connected and not machine.evicted for machine in _trainers(state))


def old_ranks_may_run(state: State) -> bool:
    """Whether ranks of the generation that was started last may still all be running: nobody who
    ran them has proven his gone, or was found to be gone himself.
    """
    return state.last_started > state.dead_through


def unproven_at(state: State) -> Seconds | None:
    """When a human is told that only old ranks keep the next ones from being started: by then their
    machines could prove them gone twice, the second time after their eviction, and then leave.
    """
    held = state.phase is Phase.STOPPING and state.full and not state.awaiting
    if not held or not old_ranks_may_run(state) or OLD_RANKS in state.paged:
        return None
    policy = state.job.policy
    proof_s = policy.gone_within_s + policy.agent_return_s
    return state.phase_since + 2 * proof_s + policy.agent_return_s


def unheard_at(state: State) -> Seconds | None:
    """When a human is told that nobody is heard of."""
    if not may_train_unheard(state) or "nobody heard" in state.paged:
        return None
    last = max(machine.silent_since for machine in _trainers(state))
    return max(last, state.progress_at) + state.job.policy.silent_s


def _trainers(state: State) -> Iterator[Machine]:
    """The machines that the newest ranks were started on, evicted ones included."""
    return (m for m in state.machines.values() if m.start_ordered == state.last_started)


def _silent_until(state: State, machine: Machine) -> tuple[Seconds, str]:
    policy = state.job.policy
    if machine.machine in state.awaiting:
        wait_s = policy.agent_return_s
        since = max(machine.silent_since, state.heard_since)
        return since + wait_s, f"its agent is silent for {wait_s:g} s"
    idle_since = max(machine.silent_since, state.heard_since)
    if machine.node_rank is not None:
        idle_since = max(idle_since, state.progress_at, state.advanced_at)
    wait_s = policy.silent_s
    return idle_since + wait_s, f"its agent is silent and nothing advanced for {wait_s:g} s"


def _owes_until(state: State, machine: Machine) -> tuple[Seconds, str]:
    policy, order = state.job.policy, state.outstanding.get(state.awaiting[machine.machine])
    if state.phase is Phase.STARTING:
        fetches = isinstance(order, StartRanks) and bool(order.fetch)
        wait_s = policy.start_within_s + (policy.fetch_within_s if fetches else 0.0)
        return machine.ordered_at + wait_s, f"it did not start its ranks within {wait_s:g} s"
    wait_s = policy.gone_within_s + policy.agent_return_s
    wait_s += order.saved_within_s if isinstance(order, StopRanks) else 0.0
    return machine.ordered_at + wait_s, f"it did not stop its ranks within {wait_s:g} s"


def _owed_from(state: State) -> Seconds:
    """No answer is overdue before: not each of ten thousand is looked at when one of them comes."""
    policy = state.job.policy
    starting = state.phase is Phase.STARTING
    wait_s = policy.start_within_s if starting else policy.gone_within_s + policy.agent_return_s
    return state.phase_since + wait_s


def heard_until(state: State, machine: Machine) -> Seconds:
    """Until when an answer of this machine is worth waiting for at the end of the job."""
    if machine.lost or machine.released:
        return AT_ONCE
    if machine.connected:
        return NEVER
    return AT_ONCE if machine.evicted else machine.silent_since + state.job.policy.agent_return_s


def lost_machines(state: State, now: Seconds) -> list[tuple[Machine, str]]:
    """Machines that count as lost by now, with the reason."""
    owing = state.awaiting if now >= _owed_from(state) else ()
    suspects = [state.machines[name] for name in (*state.silent, *owing)]
    if state.phase is Phase.STOPPING:
        suspects += [m for m in state.members() if m.survived or m.not_freed]
    suspects += spreading.perhaps_without_code(state)
    found: dict[str, tuple[Machine, str]] = {}
    unheard = may_train_unheard(state)
    for machine in suspects:
        verdict = lost_at(state, machine, unheard=unheard)
        if verdict is not None and verdict[0] <= now:
            found[machine.machine] = (machine, verdict[1])
    return list(found.values())


def settled_at(state: State) -> Seconds:
    """When a first failure that looks like the user's own is judged, if not all ranks ended before.

    Only before the job's first proven progress: later a restart must not wait for anything.
    """
    first = state.failures[0] if state.failures else None
    if first is None or first.error is None or state.proven:
        return AT_ONCE
    if len(state.exits) == state.job.world_size:
        return AT_ONCE
    return first.at + state.job.policy.settle_s


def publish_hold_until(state: State) -> Seconds:
    """A restart waits this long for an outstanding PublishStep."""
    publishing = state.disk.persist is not None and bool(state.disk.persist.publishing)
    return state.phase_since + PUBLISH_WAIT_S if publishing else AT_ONCE


def gathered_at(state: State) -> Seconds | None:
    """When positions are given although expected machines are missing; None: too few to start."""
    if state.gather_from is None or len(state.standbys()) < state.job.nnodes:
        return None
    if state.requested == 0:
        return AT_ONCE
    return state.gather_from + state.job.policy.gather_s


def ending_at(state: State) -> Seconds:
    """When the current stage of the job's end is given up."""
    policy = state.job.policy
    grace_s = 0.0 if state.ending_ready else policy.stop_grace_s
    return state.phase_since + policy.end_within_s + grace_s


def early_exit_at(state: State) -> Seconds | None:
    """When a human is told that some ranks ended with 0 and others still run."""
    if state.first_exit_at is None or "early exit" in state.paged:
        return None
    return max(state.first_exit_at, state.progress_at) + state.job.policy.early_exit_s


def proven_at(state: State) -> Seconds | None:
    """When the recovery of a script without steps is proven by time alone.

    Not while a machine of the job is silent: its ranks may have ended, and nobody can say so.
    """
    if state.incident is None or state.running_since is None or state.failures:
        return None
    if any(state.machines[name].node_rank is not None for name in state.silent):
        return None
    if state.finished_by_all >= 0:
        return None
    return state.running_since + state.job.policy.proven_after_s


def deadlines(state: State, now: Seconds) -> Iterator[Seconds]:
    """All moments at which a rule may have something to decide; past ones were decided."""
    if state.spec is None or state.phase is Phase.ENDED:
        return
    if state.phase is Phase.ENDING:
        yield ending_at(state)
        yield from (heard_until(state, machine) for machine in state.machines.values())
        return
    unheard = may_train_unheard(state)
    owed_from = _owed_from(state)
    if state.awaiting:
        yield owed_from
    for name in (*state.silent, *(state.awaiting if now >= owed_from else ())):
        verdict = lost_at(state, state.machines[name], unheard=unheard)
        if verdict is not None:
            yield verdict[0]
    for name in state.silent:
        moment = probe_at(state, state.machines[name])
        yield NEVER if moment is None else moment
    yield from due_later(state)
    yield settled_at(state)
    if state.phase is Phase.STOPPING:
        yield publish_hold_until(state)
    yield state.backup_not_before
    yield from spreading.deadlines(state)
    yield from trials.deadlines(state)
    yield from updates.deadlines(state)
    yield from quarantine.deadlines(state)
    yield from resize.deadlines(state)
    yield from looking.deadlines(state)
    moments = (gathered_at(state), early_exit_at(state), proven_at(state), unheard_at(state))
    for moment in (*moments, unproven_at(state)):
        yield NEVER if moment is None else moment
