"""The rules about machines that something speaks against: stop for them, evict them, tell people.

A part of rules.py, which gives each its place in the order of importance. What speaks against a
machine: its checks and other people's monitors (alerts.py), what its ranks printed (evidence.py),
both together (suspects.py). The guards (accusers.py) have the last word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from everstep.actions import ControllerAction, EvictMachine, PageHuman
from everstep.core.accusers import Group, groups_of, lies_in, named, waits_until
from everstep.core.alerts import (
    BOOT,
    Accusation,
    accusations,
    cause_of,
    doubts,
    flooded_until,
    matter,
    of_whole_job,
    sentence,
)
from everstep.core.deciding import Deciding
from everstep.core.evidence import accused_by_output, judged
from everstep.core.guards import too_many_restarts
from everstep.core.over_eviction import swept
from everstep.core.quarantine import acquitted, came_back
from everstep.core.state import Machine, Phase, State
from everstep.core.suspects import never_starts, pointed_at
from everstep.model import NO_VERSION, MachineId, Seconds

PAGES_MAX = 20
"""Matters that people are told of in one generation: a flood says no more."""


def stop_for(d: Deciding) -> Group | None:
    """Members for which running ranks are stopped: they are evicted once those are proven gone.

    Not when restarts bring no progress: what runs is then left to show what it is worth.
    """
    state = d.state
    running = state.phase in (Phase.STARTING, Phase.RUNNING)
    if not running or state.broken or not state.alerted or too_many_restarts(state, d.now):
        return None
    return next((group for group in _due(d) if _has_member(state, group)), None)


def _due(d: Deciding) -> list[Group]:
    """Groups that go; not yet, if others may say the same and mean what they share."""
    return [
        group
        for group in _groups(d)
        if not group.against and (_is_certain(group) or _waited(d, group.accusation))
    ]


def _is_certain(group: Group) -> bool:
    """Whether others can change nothing: enough have spoken. Of a host's part more may speak."""
    return bool(group.unit) and not group.unit.startswith(BOOT)


def _waited(d: Deciding, accusation: Accusation) -> bool:
    struck = accusation.struck
    return waits_until(d.state, accusation.cause, accusation.at, struck=struck) <= d.now


def due_later(state: State) -> Iterator[Seconds]:
    """When accusations may be decided that wait, for others' or for the end of a flood."""
    flooded = flooded_until(state)
    yield flooded
    for name in () if flooded else state.alerted:
        machine = state.machines[name]
        for noted in machine.alerts:
            cause = cause_of(state, machine, noted.alert)
            if cause:
                yield waits_until(state, cause, noted.since, struck=False)
        for strike in machine.strikes:
            cause = cause_of(state, machine, strike.alert)
            yield waits_until(state, cause, strike.at, struck=True)


def story(group: Group) -> str:
    """What is wrong with whom, as a symptom."""
    return group.why if group.unit else f"machine {named(group.machines)} is accused: {group.why}"


def evict_accused(d: Deciding) -> list[ControllerAction]:
    """Once all ranks have stopped: then every machine has told what its ranks printed."""
    if not _stopped(d.state):
        return []
    return _evictions(
        d, [group for group in _groups(d) if not group.against and _has_member(d.state, group)]
    )


def evict_standbys(d: Deciding) -> list[ControllerAction]:
    """A standby that is broken is none: somebody else is to be ready in its place."""
    if not d.state.alerted:
        return []
    return _evictions(d, [group for group in _due(d) if not _has_member(d.state, group)])


def tell_of_accused(d: Deciding) -> list[ControllerAction]:
    """Machines that are left where they are, although something speaks against them."""
    state = d.state
    spoken = state.alerted or state.evidence or state.judged
    if not spoken or (state.phase is Phase.STOPPING and state.awaiting):
        return []
    for group in _groups(d):
        certain = _is_certain(group) or group.too_many or _stopped(state)
        told = group.about in state.paged
        if group.against and not told and (certain or _waited(d, group.accusation)):
            names = named(group.machines)
            goes = "goes" if len(group.machines) == 1 else "go"
            why = f"{group.why}; {group.against}, so {names} {goes} on for now"
            cause = str(group.accusation.event)
            return [PageHuman(id=d.id(), cause=cause, why=why, about=group.about)]
    return []


def tell_of_alerts(d: Deciding) -> list[ControllerAction]:
    """What is no machine's fault, once for all machines that say it."""
    if d.now < flooded_until(d.state):
        return []
    holding = of_whole_job(d.state)
    told = {matter(noted) for noted in holding if noted.told}
    for noted in holding:
        if matter(noted) not in told and len(d.state.paged) < PAGES_MAX:
            why = f"{sentence(noted.alert)}; no machine is to blame, and none is evicted for it"
            about = matter(noted)
            return [PageHuman(id=d.id(), cause=str(noted.event), why=why, about=about)]
    return []


def by_trust(state: State, standbys: Sequence[Machine], now: Seconds) -> list[list[Machine]]:
    """Standbys in the order in which they are woken: first those that nothing speaks against, of
    these first those that can start at once.

    The others rather than nobody: their position would wait for a machine that may never come. Last
    of all who was accused and acquitted: it rests on tests that may not see what its ranks saw.
    """
    tiers: list[list[Machine]] = [[], [], [], [], []]
    for machine in standbys:
        if _acquitted_of(state, machine.machine):
            tiers[4].append(machine)
            continue
        doubted = bool(doubts(state, machine, now))
        in_bad = any(lies_in(machine, unit) for unit in state.bad_units)
        trusted = 0 if _starts_at_once(state, machine) else 1
        tiers[3 if doubted else 2 if in_bad else trusted].append(machine)
    return tiers


def _starts_at_once(state: State, machine: Machine) -> bool:
    """Nobody does before the job's start, and positions go by names then. Who was evicted before is
    as good as who is not ready.
    """
    if state.phase is Phase.GATHERING:
        return True
    if came_back(state, machine.machine):
        return False
    held = state.version == NO_VERSION or state.version in (machine.versions or ())
    return machine.ready and held


def but(state: State, machine: MachineId, now: Seconds) -> str:
    """What speaks against a standby that is woken all the same; empty if nothing does."""
    doubted = doubts(state, state.machines[machine], now)
    if doubted:
        return f", although {sentence(doubted[0].alert)}"
    before = _acquitted_of(state, machine)
    return f", although it was evicted before: {before}" if before else ""


def _acquitted_of(state: State, machine: MachineId) -> str:
    """What was said against a machine that came back from its eviction; empty if nothing was."""
    record = came_back(state, machine)
    return record.why if record is not None and record.accused else ""


def _stopped(state: State) -> bool:
    return state.phase is Phase.STOPPING and not state.awaiting


def _groups(d: Deciding) -> list[Group]:
    """What the guards say: of what checks say, and of the failure once all ranks have stopped."""
    if d.groups is None:
        d.groups = _ruling(d)
    return d.groups


def _ruling(d: Deciding) -> list[Group]:
    state = d.state
    stopped = _stopped(state)
    if not stopped and d.now < flooded_until(state):
        return []
    accused = accusations(state, d.now, state.phase_since if stopped else None)
    if stopped and state.incident is not None:
        more = _by_failure(state, accused, d.now)
        accused += [each for each in more if each.machine not in acquitted(state)]
    groups = groups_of(state, accused, d.now)
    shown = swept(state, groups, d.now) if stopped else None
    return groups if shown is None else [*groups, shown]


def _by_failure(state: State, accused: Sequence[Accusation], now: Seconds) -> list[Accusation]:
    """What the failure itself says, of machines that are not accused anyway."""
    found = judged(state)
    more = list(never_starts(state, now))
    if found is not None:
        more += [*accused_by_output(state, found, now), *pointed_at(state, found, now)]
    known = {each.machine for each in accused}
    firsts = {each.machine: each for each in reversed(more) if each.machine not in known}
    return list(reversed(firsts.values()))


def _has_member(state: State, group: Group) -> bool:
    return any(state.machines[name].node_rank is not None for name in group.machines)


def _evictions(d: Deciding, groups: Sequence[Group]) -> list[ControllerAction]:
    return [
        EvictMachine(
            id=d.id(),
            cause=str(group.accusation.event),
            why=group.why,
            machine=machine,
            accused=True,
            unit=group.unit,
        )
        for group in groups
        for machine in group.machines
    ]
