"""A second path to machines that are silent: others are asked whether they reach them.

A cut link shows as silence of the agent and as training that stands still, and so does an agent
that was killed at a bad moment. If two other machines cannot reach it either, twice in a row, it is
gone; if one can, its keeper is given time (patience.py). Seconds instead of a minute.

The rule probe_silent is a part of rules.py, machine_probed one of observe.py, probe_machine one of
commit.py; patience.py asks probe_at() for the next deadline and given_up() for the verdict.
"""

from __future__ import annotations

from everstep.actions import ControllerAction, ProbeMachine
from everstep.core.deciding import Deciding
from everstep.core.state import Machine, Phase, Probe, State
from everstep.events import MachineProbed
from everstep.model import NO_STEP, MachineId, Seconds

PROBERS = 2
"""Machines that are asked each time, if so many are heard of."""
ATTEMPTS = 2
"""So often in a row nobody must reach it: one try may meet a flood on the network."""
ANY_PORT = 9
"""Of a machine that told of no port: the discard service's, where rarely anybody listens."""


def probe_silent(d: Deciding) -> list[ControllerAction]:
    """Ask for the first machine whose time has come; the next one comes with the next question."""
    for name in d.state.silent:
        machine = d.state.machines[name]
        at = probe_at(d.state, machine)
        if at is not None and at <= d.now:
            return _probes(d, machine)
    return []


def _probes(d: Deciding, target: Machine) -> list[ControllerAction]:
    state = d.state
    former = state.probes.get(target.machine)
    silent_s = d.now - target.silent_since
    return [
        ProbeMachine(
            id=d.id(),
            cause=d.event,
            why=f"the agent of {target.machine} is silent for {silent_s:.1f} s and nothing"
            f" advances: can {prober.machine} reach it?",
            machine=prober.machine,
            target=target.machine,
            address=target.shard_address or target.address,
            port=target.shard_port or target.store_port or ANY_PORT,
            within_s=state.job.policy.probe_within_s,
            attempt=1 if former is None else former.attempt + 1,
        )
        for prober in _probers(state, target)
    ]


def _probers(state: State, target: Machine) -> list[Machine]:
    """The next ones in order of position, spread over all that are heard: each time the same."""
    heard = [m for m in state.members() if m.connected] or _heard_standbys(state)
    if len(heard) < PROBERS:
        heard += [m for m in _heard_standbys(state) if m not in heard]
    first = PROBERS * (target.node_rank or 0)
    count = min(PROBERS, len(heard))
    return [heard[(first + at) % len(heard)] for at in range(count)]


def _heard_standbys(state: State) -> list[Machine]:
    return [machine for machine in state.standbys() if machine.connected]


def probe_at(state: State, machine: Machine) -> Seconds | None:
    """When others are asked to reach it if nothing changes; None: nothing speaks for it."""
    if not _is_riddle(state, machine):
        return None
    policy, probe = state.job.policy, state.probes.get(machine.machine)
    idle_s = max(policy.probe_idle_s, policy.probe_idle_steps * (state.step_s or 0.0))
    idle_since = max(state.progress_at, state.advanced_at, state.heard_since)
    moment = max(machine.silent_since + policy.probe_after_s, idle_since + idle_s)
    if probe is None:
        return moment
    if probe.given_up_at is not None:
        return None
    at_once = probe.in_vain and not probe.awaiting
    return moment if at_once else max(moment, probe.asked_at + policy.probe_again_s)


def _is_riddle(state: State, machine: Machine) -> bool:
    """A silent member of a generation that trained, while nobody waits for an answer of it anyway,
    and enough others are heard for their word to mean something.
    """
    trains = state.phase in (Phase.STARTING, Phase.RUNNING) and not state.failures
    member = machine.node_rank is not None and machine.machine not in state.awaiting
    if not trains or not member or machine.connected or state.finished_by_all == NO_STEP:
        return False
    others = any(m.connected for m in state.members()) or bool(_heard_standbys(state))
    return others and not _may_be_cut_off(state)


def _may_be_cut_off(state: State) -> bool:
    """More than half of the job is silent: it may be the controller that is on the wrong side."""
    silent = sum(state.machines[name].node_rank is not None for name in state.silent)
    return 2 * silent > state.job.nnodes


def probe_machine(state: State, action: ProbeMachine, now: Seconds) -> None:
    """The order is given."""
    probe = state.probes.get(action.target)
    if probe is None or probe.attempt != action.attempt:
        # An attempt that somebody did not answer says nothing.
        in_vain = probe.in_vain if probe is not None and not probe.awaiting else 0
        forget_probe(state, action.target)
        probe = Probe(attempt=action.attempt, asked_at=now, in_vain=in_vain)
        state.probes[action.target] = probe
    probe.awaiting[action.id] = None
    state.outstanding[action.id] = action


def machine_probed(state: State, event: MachineProbed, now: Seconds) -> None:
    """One answer. The first that is not "unreachable" ends the attempt, and what was before it."""
    state.outstanding.pop(event.action, None)
    probe = state.probes.get(event.target)
    if probe is None or event.action not in probe.awaiting:
        return
    del probe.awaiting[event.action]
    if event.reachable is not False:
        probe.in_vain = 0
        probe.unreached.clear()
        _call_off(state, probe)
        return
    probe.unreached.append(event.machine)
    if probe.awaiting:
        return
    probe.in_vain += 1
    if probe.in_vain >= ATTEMPTS and not _may_be_cut_off(state):
        probe.given_up_at = now


def _call_off(state: State, probe: Probe) -> None:
    for action in probe.awaiting:
        state.outstanding.pop(action, None)
    probe.awaiting.clear()


def forget_probe(state: State, target: MachineId) -> None:
    """It is heard of again, or gone."""
    probe = state.probes.pop(target, None)
    if probe is not None:
        _call_off(state, probe)


def forget_probes(state: State) -> None:
    """Training advances, or the generation is over: what was asked does not matter any more."""
    for target in list(state.probes):
        forget_probe(state, target)


def given_up(state: State, machine: Machine) -> str:
    """Why the machine counts as lost because nobody reaches it; empty if it does not."""
    probe = state.probes.get(machine.machine)
    if probe is None or probe.given_up_at is None:
        return ""
    silent_s = probe.given_up_at - machine.silent_since
    who = " and ".join(probe.unreached)
    return (
        f"its agent is silent for {silent_s:.0f} s, nothing advances, and {who} cannot reach it"
        f"{_whole_unit(state, machine)}"
    )


def _whole_unit(state: State, machine: Machine) -> str:
    """The unit of which most members are silent, with this machine: a switch, a rack."""
    for unit in machine.units:
        members = [m for m in state.members() if unit in m.units]
        silent = [m.machine for m in members if not m.connected]
        if len(silent) > 1 and 2 * len(silent) > len(members):
            return f"; {len(silent)} of the {len(members)} machines of {unit} are silent"
    return ""
