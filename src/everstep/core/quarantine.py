"""What becomes of evicted machines: blocked, tested while others train, and maybe back again.

A machine that was evicted and still speaks proves its old ranks gone, and others may fetch from it
what these had saved. Then it is tested. Who fails is guilty and goes; who passes twice, with time
in between, is innocent and a standby again. Nobody is tested who cannot be trusted with it: whose
ranks could not be killed, or who was evicted so often that it is out for good. A host that comes
back under another name is no other machine. So each eviction gets its verdict, and the share of
false ones is known.

observe.py and commit.py have facts and decisions noted here; treat_evicted is a rule of rules.py;
the shells ask taken_away() for what the owner of the machines may have back.
"""

from __future__ import annotations

from collections.abc import Iterator

from everstep.actions import (
    ControllerAction,
    EvictMachine,
    GiveVerdict,
    ReleaseMachine,
    ReturnMachine,
    StopRanks,
    TestMachine,
)
from everstep.core.alerts import OWN_SOURCES, sentence, usable
from everstep.core.deciding import Deciding
from everstep.core.history import Eviction
from everstep.core.restore import gives_before_it_goes
from everstep.core.state import Machine, Phase, State
from everstep.diagnosis.words import Verdict
from everstep.events import MachineTested
from everstep.model import NO_GENERATION, NO_STEP, MachineId, Seconds

PASSES = 2
"""So many tests passed make a machine a standby again: what comes and goes shows in one of them."""
UNTOLD_MAX = 3
"""So many tests of which nothing came, and it goes without a verdict."""
ANSWER_S: Seconds = 30.0
"""Beyond the time for a test, until its answer must have come: an agent may be started anew."""
AT_ONCE: Seconds = float("-inf")
_GRAVE = (Verdict.SUSPECT, Verdict.EVICT)


# --- taking note ---------------------------------------------------------------------------------


def evicted(state: State, action: EvictMachine, now: Seconds) -> None:
    """Keep a record of it; its position is still its own."""
    machine = state.machines[action.machine]
    record = Eviction(
        machine=action.machine,
        host=machine.host,
        at=now,
        action=action.id,
        why=action.why,
        accused=action.accused,
        member=machine.node_rank is not None,
        unit=action.unit,
        incident=state.incident.incident if state.incident is not None else "",
    )
    state.evictions.append(record)
    record.quarantined = machine.connected and not _never_tested(state, machine, record, now)


def machine_came(state: State, machine: Machine, *, new: bool, restarted: bool) -> None:
    """A machine of this name joined, for the first time or not, maybe with another agent.

    Names of stand-ins are never used twice, and their host says nothing of them.
    """
    if new:
        former = _blocking(state, machine)
        if former is not None:
            machine.evicted = f"its host was evicted as {former.machine}: {former.why}"
            former.back_as = machine.machine
            _anew(former)
    elif machine.evicted and restarted and (machine.released or machine.lost):
        machine.released, machine.lost = False, ""
        former = of_machine(state, machine.machine)
        if former is not None:
            _anew(former)


def _blocking(state: State, machine: Machine) -> Eviction | None:
    """The eviction that keeps a host out under whatever name it comes."""
    if not _known_by_host(state, machine):
        return None
    mine = [each for each in state.evictions if each.host == machine.host]
    return mine[-1] if mine and not mine[-1].returned else None


def _known_by_host(state: State, machine: Machine) -> bool:
    """Whether its host has a name of its own; of two machines of one name, neither is meant."""
    others = (m for m in state.machines.values() if m.host == machine.host and m is not machine)
    return not state.job.local and bool(machine.host) and not any(map(usable, others))


def _anew(record: Eviction) -> None:
    """Whatever it was found to be before, it may have been repaired."""
    record.passed = record.untold = 0
    record.failed = record.asked = ""


def new_term(state: State, now: Seconds) -> None:
    """Every patience starts anew."""
    for record in state.evictions:
        if record.asked in state.outstanding:
            record.asked_at = now


def stop_ranks(state: State, action: StopRanks, now: Seconds) -> None:
    """It is to prove its old ranks gone; nobody waits for that."""
    _ask(state, action, now)


def test_machine(state: State, action: TestMachine, now: Seconds) -> None:
    """A test was ordered. The one before may have had no answer."""
    record = of_machine(state, action.machine)
    if record is None:
        return
    if record.asked in state.outstanding:
        del state.outstanding[record.asked]
        record.untold += 1
        record.told = f"it did not answer for {now - record.asked_at:.0f} s"
    record.tests = action.attempt
    _ask(state, action, now)


def _ask(state: State, action: StopRanks | TestMachine, now: Seconds) -> None:
    state.outstanding[action.id] = action
    record = of_machine(state, action.machine)
    if record is not None:
        record.quarantined = True
        record.asked, record.asked_at = action.id, now


def machine_tested(state: State, event: MachineTested, now: Seconds) -> None:
    """What came of a test. What its own checks told lately weighs more than what passes now."""
    state.outstanding.pop(event.action, None)
    machine, record = state.machines.get(event.machine), of_machine(state, event.machine)
    if machine is None or not machine.evicted or record is None or record.asked != event.action:
        return
    record.asked, record.tested_at, record.told = "", now, event.why
    standing = _standing(machine)
    if event.passed is False:
        record.failed = event.why
    elif event.passed is None or standing:
        record.untold += 1
        record.told = event.why if event.passed is None else standing
    else:
        record.passed += 1


def _standing(machine: Machine) -> str:
    """What its own checks have said and not taken back: they will not say it again."""
    for noted in machine.alerts:
        own = noted.alert.source in OWN_SOURCES and noted.cleared_at is None
        if own and noted.alert.result.verdict in _GRAVE:
            return sentence(noted.alert)
    return ""


def give_verdict(state: State, action: GiveVerdict, now: Seconds) -> None:
    """It is known now."""
    del now
    record = of_machine(state, action.machine)
    if record is not None:
        record.guilty, record.verdict = action.guilty, action.why


def return_machine(state: State, action: ReturnMachine, now: Seconds) -> None:
    """It is a standby again, and what was said against it does not count any more.

    Not as something that is over, either: while ranks are stopped, what was enough then is enough.
    Nor because it goes on: tests passed all the same, and would again.
    """
    machine, record = state.machines[action.machine], of_machine(state, action.machine)
    if record is not None:
        record.returned, record.quarantined = True, False
    machine.evicted = ""
    machine.survived, machine.not_freed = (), ""
    machine.finished = NO_STEP
    machine.strikes = []
    machine.alerts = [n for n in machine.alerts if n.alert.result.verdict not in _GRAVE]
    for noted in machine.alerts:
        noted.acquitted = noted.cleared_at is None
    if machine.alerts:
        state.alerted[action.machine] = None
    if state.gather_from is None and len(state.standbys()) >= state.job.nnodes:
        state.gather_from = now


def release_machine(state: State, action: ReleaseMachine) -> None:
    """It is looked into no more."""
    record = of_machine(state, action.machine)
    if record is not None:
        record.quarantined = False


# --- for others ----------------------------------------------------------------------------------


def of_machine(state: State, name: MachineId) -> Eviction | None:
    """The newest eviction of this machine, or of its host under another name."""
    for record in reversed(state.evictions):
        if name in (record.machine, record.back_as):
            return record
    return None


def acquitted(state: State) -> set[MachineId]:
    """Machines that came back since they were evicted in the open incident: what their ranks had
    printed before was looked into.
    """
    incident = state.incident
    if incident is None:
        return set()
    known = [e for e in state.evictions if e.returned and e.incident == incident.incident]
    return {each.machine for each in known}


def came_back(state: State, name: MachineId) -> Eviction | None:
    """Its eviction, if it was evicted before and is in the job again."""
    record = of_machine(state, name)
    return record if record is not None and record.returned else None


def taken_away(state: State, name: MachineId) -> bool:
    """Whether the owner of the machines may have this evicted one back now, whatever runs there.

    Asked when it was evicted, when its agent is gone, and by each new controller, which hears of
    none at first.
    """
    machine, record = state.machines.get(name), of_machine(state, name)
    if machine is None or not machine.evicted:
        return False
    kept = record is not None and record.quarantined
    return machine.released or bool(machine.lost) or not (machine.connected or kept)


# --- deciding ------------------------------------------------------------------------------------


def treat_evicted(d: Deciding) -> list[ControllerAction]:
    """The next step with each of them that is heard of."""
    due = [each for each in _heard(d.state) if not _waits(d, *each)]
    if not due:
        return []
    leaving = {a.machine for a in d.state.outstanding.values() if isinstance(a, ReleaseMachine)}
    return [
        action
        for machine, record in due
        if machine.machine not in leaving
        for action in _next(d, machine, record)
    ]


def _waits(d: Deciding, machine: Machine, record: Eviction) -> bool:
    """Whether it has nothing to do but to answer, or to wait for its next test. Asked at every
    event, of maybe a thousand machines.
    """
    settled = record.failed or record.passed >= PASSES or record.untold >= UNTOLD_MAX
    asked = record.asked in d.state.outstanding
    to_prove = not asked and not _proven_gone(d.state, machine)
    if settled or to_prove or d.now >= _moment(d.state, record):
        return False
    return not _not_to_be_tested(machine, record)


def _heard(state: State) -> list[tuple[Machine, Eviction]]:
    """Evicted machines that are connected, with what is known of each."""
    if not state.evictions:
        return []
    newest: dict[MachineId, Eviction] = {}
    for record in state.evictions:
        newest[record.machine] = record
        if record.back_as:
            newest[record.back_as] = record
    known = ((state.machines[name], record) for name, record in newest.items())
    return [(m, record) for m, record in known if m.evicted and m.connected and not m.released]


def _next(d: Deciding, machine: Machine, record: Eviction) -> list[ControllerAction]:
    state = d.state
    needed = _is_needed(state, machine)
    held = needed and state.full
    against = _never_tested(state, machine, record, d.now) or _given_up(d, machine, record)
    if against:
        return [] if needed else [_release(d, machine, against)]
    if record.failed:
        why = f"it was evicted ({machine.evicted}), and a test failed: {record.failed}"
        return [] if needed else [*_verdict(d, machine, record, why), _release(d, machine, why)]
    if record.passed >= PASSES:
        why = f"{PASSES} tests found nothing wrong with it"
        why += f" (the last: {record.told})" if record.told else ""
        why += f", although {machine.evicted}"
        return [] if held else [*_verdict(d, machine, record, why), _return(d, machine, why)]
    if not _proven_gone(state, machine):
        return _prove(d, machine, record)
    due = _moment(state, record) <= d.now and not held
    return _test(d, machine, record) if due else []


def _is_needed(state: State, machine: Machine) -> bool:
    """Others may have to fetch from it what its ranks had saved."""
    starting = state.phase in (Phase.STOPPING, Phase.STARTING)
    return starting and gives_before_it_goes(state, machine)


def _never_tested(state: State, machine: Machine, record: Eviction, now: Seconds) -> str:
    """Why it goes without being looked into; empty if it is."""
    against = _not_to_be_tested(machine, record)
    if against:
        return against
    why = _was_evicted(machine, record)
    policy = state.job.policy
    times = _times(state, machine, now)
    if times < policy.evictions_max:
        return ""
    days = policy.evictions_window_s / 86400
    return f"{why}; {times} evictions in {days:g} days are enough: it is out for good"


def _was_evicted(machine: Machine, record: Eviction) -> str:
    return f"it was evicted: {machine.evicted or record.why}"


def _not_to_be_tested(machine: Machine, record: Eviction) -> str:
    """Why it goes as it is, however seldom it was evicted; empty if nothing of it says so."""
    why = _was_evicted(machine, record)
    if machine.left_behind:
        return why if machine.left_behind in why else f"{why}; {machine.left_behind}"
    if machine.versions is None or machine.lost:
        return why
    if record.back_as and record.back_as != machine.machine:
        return f"{why}; its host is back as {record.back_as}"
    return ""


def _times(state: State, machine: Machine, now: Seconds) -> int:
    """How often it was evicted lately, under whatever name."""
    since, by_host = now - state.job.policy.evictions_window_s, _known_by_host(state, machine)
    return sum(
        each.at > since
        and (
            machine.machine in (each.machine, each.back_as)
            or (by_host and each.host == machine.host)
        )
        for each in state.evictions
    )


def _given_up(d: Deciding, machine: Machine, record: Eviction) -> str:
    """Why it goes without a verdict; empty if there is hope."""
    order = d.state.outstanding.get(record.asked)
    late = order is not None and _moment(d.state, record) <= d.now
    waited_s = d.now - record.asked_at
    why = f"it was evicted: {machine.evicted}"
    if late and isinstance(order, StopRanks):
        return f"{why}; its old ranks were not proven gone within {waited_s:.0f} s"
    if record.untold + late < UNTOLD_MAX:
        return ""
    told = f"it did not answer for {waited_s:.0f} s" if late else record.told
    return f"{why}; {UNTOLD_MAX} tests could not tell whether it is sound, the last since {told}"


def _proven_gone(state: State, machine: Machine) -> bool:
    """Whether no rank of this job runs there."""
    nothing_ran = state.generation == NO_GENERATION
    return nothing_ran or machine.stopped_for > machine.start_ordered


def _prove(d: Deciding, machine: Machine, record: Eviction) -> list[ControllerAction]:
    """Before anything else; but the generation that it was a part of must be over first."""
    state = d.state
    if record.asked in state.outstanding or state.generation <= machine.start_ordered:
        return []
    return [
        StopRanks(
            id=d.id(),
            cause=d.event,
            why=f"it was evicted: nothing of ours may run there before {machine.machine} is tested",
            machine=machine.machine,
            generation=state.generation,
            within_s=state.job.policy.gone_within_s,
        )
    ]


def _test(d: Deciding, machine: Machine, record: Eviction) -> list[ControllerAction]:
    why = f"is {machine.machine} sound? It was evicted: {machine.evicted}"
    if record.tests:
        why += f"; {record.passed} of {PASSES} tests are passed"
    return [
        TestMachine(
            id=d.id(),
            cause=record.action,
            why=why,
            machine=machine.machine,
            attempt=record.tests + 1,
            within_s=d.state.job.policy.test_within_s,
        )
    ]


def _verdict(
    d: Deciding, machine: Machine, record: Eviction, why: str
) -> Iterator[ControllerAction]:
    """Once for each eviction: a machine that was repaired was guilty all the same."""
    if record.guilty is None:
        yield GiveVerdict(
            id=d.id(),
            cause=record.action,
            why=why,
            machine=machine.machine,
            guilty=bool(record.failed),
        )


def _release(d: Deciding, machine: Machine, why: str) -> ControllerAction:
    return ReleaseMachine(id=d.id(), cause=d.event, why=why, machine=machine.machine)


def _return(d: Deciding, machine: Machine, why: str) -> ControllerAction:
    return ReturnMachine(
        id=d.id(), cause=d.event, why=f"{why}: it is a standby again", machine=machine.machine
    )


# --- when ----------------------------------------------------------------------------------------


def _moment(state: State, record: Eviction) -> Seconds:
    """When the next thing happens with it: patience ends, or a test is due."""
    policy, order = state.job.policy, state.outstanding.get(record.asked)
    if isinstance(order, StopRanks):
        return record.asked_at + policy.gone_within_s + policy.agent_return_s
    if isinstance(order, TestMachine):
        return record.asked_at + max(order.within_s + ANSWER_S, policy.retest_after_s)
    return record.tested_at + policy.retest_after_s if record.tests else AT_ONCE


def deadlines(state: State) -> Iterator[Seconds]:
    """When a test is due, or an answer overdue."""
    yield from (_moment(state, record) for _, record in _heard(state))
