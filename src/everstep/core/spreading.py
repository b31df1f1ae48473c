"""How code versions come to machines: rules in the sense of rules.py.

A version spreads from machine to machine: who has it gives it to a few at a time, so the number of
those who have it grows fivefold with every wave, and the controller sends it a few times only.
Nobody is waited for without end: who cannot get what is to run, three times, leaves the job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from everstep.actions import (
    ControllerAction,
    FinishJob,
    HoldVersion,
    Outcome,
    SwitchCode,
)
from everstep.core.alerts import usable
from everstep.core.deciding import Deciding
from everstep.core.history import Condition, VersionBook
from everstep.core.state import Machine, Phase, State
from everstep.core.versions import last_good, named, pending
from everstep.events import VersionHeld, VersionNotHeld
from everstep.model import NO_VERSION, AgentAt, MachineId, Seconds, VersionId

SERVES_MAX = 4
"""Machines that fetch from one holder at the same time; the controller is one, too."""
HOLDS_MAX = 3
"""A machine that could not get a version so often cannot get it."""
HOLD_RETRY_S: Seconds = 10.0
"""After a machine could not get a version: what failed (a cut link, a full disk) rarely heals at
once."""
SCANS_MAX = 100_000
"""Machines that are looked at for a version within one second, in so many events: what ten thousand
answers of a second bring is decided at its end."""
HOLD_AGAIN_S: Seconds = 600.0
"""The same for one that could not get it so often: nobody waits for it."""


# --- who has it ----------------------------------------------------------------------------------


def can_run(state: State, machine: Machine, version: VersionId) -> bool:
    """Whether its ranks could run this version now. Old agents run the code as it lies there."""
    if machine.versions is None:
        return version in (NO_VERSION, state.job.code.version)
    return version == NO_VERSION or version in machine.versions


def cannot_get(state: State, machine: Machine, version: VersionId, now: Seconds) -> str:
    """Why nobody waits for this machine to get it; empty if it has it, or may yet."""
    if can_run(state, machine, version):
        return ""
    if machine.versions is None:
        return f"its agent is of an everstep that cannot change code, and {_runs(state, version)}"
    failed = failed_to_get(state, machine, version)
    if failed:
        return failed
    silent_s = state.job.policy.hold_within_s
    if not machine.connected and now >= machine.silent_since + silent_s:
        return f"its agent is silent for {silent_s:g} s, without {named(state, version)}"
    return ""


def failed_to_get(state: State, machine: Machine, version: VersionId) -> str:
    book = state.versions.get(version)
    failed = book.not_held.get(machine.machine, 0) if book is not None else 0
    if book is None or failed < HOLDS_MAX:
        return ""
    reason = book.reasons.get(machine.machine, "")
    return f"it could not get {named(state, version)} in {failed} attempts: {reason}"


def _runs(state: State, version: VersionId) -> str:
    return f"{named(state, version)} is not what the job was submitted with"


def lacks_code(state: State) -> bool:
    """Whether a member cannot run yet what the next generation runs."""
    return any(not can_run(state, machine, state.version) for machine in state.members())


def perhaps_without_code(state: State) -> list[Machine]:
    """All whom lost_without_code() may be about: mostly nobody. It is asked at every event."""
    book = state.versions.get(state.version)
    if book is None or state.phase is not Phase.STOPPING:
        return []
    failed = [state.machines[name] for name in book.not_held]
    if state.version == state.job.code.version:
        return failed
    return [*failed, *(machine for machine in state.members() if machine.versions is None)]


def lost_without_code(state: State, machine: Machine) -> str:
    """Why a member goes that cannot run what the next generation runs; empty if it stays.

    Silence is judged elsewhere. If more machines cannot get it than have it, they are not to blame.
    """
    if state.phase is not Phase.STOPPING or machine.node_rank is None:
        return ""
    if can_run(state, machine, state.version):
        return ""
    if machine.versions is None:
        return cannot_get(state, machine, state.version, machine.silent_since)
    why = failed_to_get(state, machine, state.version)
    return why if why and not _too_many_without(state) else ""


def _too_many_without(state: State) -> bool:
    return len(_without(state)) > len(_holders(state, state.version))


def _without(state: State) -> list[Machine]:
    """Members that cannot get what the next generation runs."""
    return [machine for machine in state.members() if failed_to_get(state, machine, state.version)]


def give_up_without_code(d: Deciding) -> list[ControllerAction]:
    """Most machines cannot get the code: other machines could not either."""
    state = d.state
    if state.phase is not Phase.STOPPING or state.awaiting or not state.versions:
        return []
    if not lacks_code(state):
        return []
    without = _without(state)
    may_come = any(
        not can_run(state, machine, state.version) and machine not in without
        for machine in state.members()
    )
    if not without or may_come or not _too_many_without(state):
        return []
    first = without[0]
    why = (
        f"{len(without)} of {state.job.nnodes} machines could not get the code that is to run:"
        f" {first.machine} for one: {failed_to_get(state, first, state.version)}"
    )
    before = _ran_before(state)
    if before is None:
        return [
            FinishJob(
                id=d.id(), cause=d.event, why=why, outcome=Outcome.FAILED, exit_code=1, detail=""
            )
        ]
    return [
        SwitchCode(
            id=d.id(),
            cause=d.event,
            why=f"{why}; back to {named(state, before.code.version)}, which they all have",
            version=before.code.version,
            previous=state.version,
            rolled_back=True,
        )
    ]


def _ran_before(state: State) -> VersionBook | None:
    """What ran until the code that is to run took its place, if all members can run that."""
    since = state.versions[state.version].runs[-1].since
    for book in state.versions.values():
        ran = book.condition is Condition.RAN and book.runs and book.runs[-1].until == since
        if ran and all(can_run(state, each, book.code.version) for each in state.members()):
            return book
    return None


# --- answers -------------------------------------------------------------------------------------


def joined(state: State, machine: Machine, versions: Sequence[VersionId] | None) -> None:
    """What it has. It may yet drop what orders under way do not tell it to keep."""
    machine.versions = None if versions is None else dict.fromkeys(versions)
    for order in state.outstanding.values():
        if not isinstance(order, HoldVersion) or order.machine != machine.machine:
            continue
        if machine.versions is not None:
            machine.versions = _kept(machine.versions, order)


def held(state: State, event: VersionHeld) -> None:
    """One more machine has it; what it was not told to keep it may have dropped."""
    machine, order = state.machines.get(event.machine), _answered(state, event)
    if order is None or machine is None or machine.versions is None:
        return
    machine.versions = _kept(machine.versions, order) | {order.version: None}
    book = state.versions.get(order.version)
    if book is not None:
        for noted in (book.asked, book.not_held, book.reasons):
            noted.pop(event.machine, None)


def not_held(state: State, event: VersionNotHeld, now: Seconds) -> None:
    """It could not get it: later again, and not for ever."""
    machine, order = state.machines.get(event.machine), _answered(state, event)
    if order is None or machine is None or machine.versions is None:
        return
    machine.versions = _kept(machine.versions, order)
    machine.versions.pop(order.version, None)
    book = state.versions.get(order.version)
    if book is not None:
        book.asked[event.machine] = now
        _count_failed(book, event.machine, event.reason)


def _answered(state: State, event: VersionHeld | VersionNotHeld) -> HoldVersion | None:
    order = state.outstanding.get(event.action)
    if not isinstance(order, HoldVersion) or order.version != event.version:
        return None
    del state.outstanding[event.action]
    return order


def _kept(versions: dict[VersionId, None], order: HoldVersion) -> dict[VersionId, None]:
    return {version: None for version in versions if version in order.keep}


def _count_failed(book: VersionBook, machine: MachineId, reason: str) -> None:
    book.not_held[machine] = book.not_held.get(machine, 0) + 1
    book.reasons[machine] = reason


def everybody_has(state: State, version: VersionId, now: Seconds) -> bool:
    """Every member, but for those for whom nobody waits and that a standby can replace."""
    instead = 0
    for machine in runners(state):
        if can_run(state, machine, version):
            continue
        if not cannot_get(state, machine, version, now):
            return False
        instead += 1
    return instead <= (len(spares(state, version)) if instead else 0)


def standbys_have(state: State, version: VersionId) -> bool:
    """Ready standbys as well; those that failed once are waited for no more."""
    book = state.versions[version]
    return all(
        can_run(state, machine, version) or machine.machine in book.not_held
        for machine in state.standbys()
        if machine.ready and machine.versions is not None
    )


def runners(state: State) -> list[Machine]:
    return state.members() or state.standbys()


def spares(state: State, version: VersionId) -> list[Machine]:
    return [m for m in state.standbys() if m.versions is not None and version in m.versions]


def _holders(state: State, version: VersionId) -> list[Machine]:
    """Silent ones included: that they have it shows that it can be had."""
    return [
        m
        for m in state.machines.values()
        if usable(m) and m.versions is not None and version in m.versions
    ]


def crowded_until(state: State) -> Seconds:
    """Until when nobody is asked who has what, since so much is being said; long ago: go on."""
    many = state.flood.events * len(state.machines) > SCANS_MAX
    return state.flood.second + 1.0 if many else 0.0


# --- spreading -----------------------------------------------------------------------------------


def hold_versions(d: Deciding) -> list[ControllerAction]:
    """Bring what is wanted to those who lack it: what runs first."""
    state = d.state
    if d.now < crowded_until(state):
        return []
    wanted = _wanted(state)
    needed = wanted.keys()
    lacking = [
        machine
        for machine in state.machines.values()
        if machine.versions is not None and not needed <= machine.versions.keys()
        if machine.connected and usable(machine)
    ]
    if not lacking:
        return []
    lacking.sort(key=lambda machine: machine.node_rank is None)
    under_way = _under_way(state)
    return [
        order
        for version, what in wanted.items()
        for order in _spread(d, version, what, lacking, under_way)
    ]


def _wanted(state: State) -> dict[VersionId, str]:
    """What all machines are to have, and why: the most urgent first."""
    if state.version not in state.versions:
        return {}  # the job's code is not versioned
    found = {state.version: "it is what runs"}
    if state.rollback is not None and state.rollback.version in state.versions:
        found.setdefault(state.rollback.version, "it is to be rolled back to")
    for book in pending(state):
        found.setdefault(book.code.version, f"{book.by or 'somebody'} sent it")
    before = last_good(state)
    if before is not None:
        found.setdefault(before.code.version, "it may be rolled back to")
    return found


def _under_way(state: State) -> dict[tuple[MachineId, VersionId], HoldVersion]:
    orders = (order for order in state.outstanding.values() if isinstance(order, HoldVersion))
    return {(order.machine, order.version): order for order in orders}


def _spread(
    d: Deciding,
    version: VersionId,
    what: str,
    lacking: list[Machine],
    under_way: dict[tuple[MachineId, VersionId], HoldVersion],
) -> Iterator[HoldVersion]:
    """One wave: as many as can be served now."""
    state, book = d.state, d.state.versions[version]
    due = [
        machine
        for machine in lacking
        if not can_run(state, machine, version)
        if d.now >= _again_at(state, book, machine, asked=(machine.machine, version) in under_way)
    ]
    if not due:
        return
    keep = tuple(dict.fromkeys((*_wanted(state), state.job.code.version)))
    serves: Counter[MachineId | None] = Counter(
        order.sources[0].machine if order.sources else None
        for (_, wanted), order in under_way.items()
        if wanted == version and state.machines[order.machine].connected
    )
    peers = _peers(state, version, serves)
    for machine in due:
        source = None if machine.machine in book.not_held else next(peers, None)
        if source is None and serves[None] >= SERVES_MAX:
            continue
        serves[source.machine if source is not None else None] += 1
        where = f"from {source.machine}" if source is not None else "from the controller"
        yield HoldVersion(
            id=d.id(),
            cause=d.event,
            why=f"{machine.machine} gets {named(state, version)} {where}, unless it lies there:"
            f" {what}",
            machine=machine.machine,
            version=version,
            sources=() if source is None else (source,),
            keep=keep,
            within_s=state.job.policy.hold_within_s,
        )


def _peers(
    state: State, version: VersionId, serves: Counter[MachineId | None]
) -> Iterator[AgentAt]:
    """Who can give it now, once for each machine that it may serve.

    Without one the controller gives it, and to those who could not get it from another.
    """
    for machine in state.machines.values():
        gives = machine.shard_port and machine.connected and usable(machine)
        if gives and machine.versions is not None and version in machine.versions:
            while serves[machine.machine] < SERVES_MAX:
                yield AgentAt(
                    machine=machine.machine,
                    address=machine.shard_address,
                    port=machine.shard_port,
                )


def _again_at(state: State, book: VersionBook, machine: Machine, *, asked: bool) -> Seconds:
    """When it is told to get it, again."""
    since = book.asked.get(machine.machine)
    if since is None:
        return float("-inf")
    if book.not_held.get(machine.machine, 0) >= HOLDS_MAX:
        return since + HOLD_AGAIN_S
    policy = state.job.policy
    return since + (policy.hold_within_s + policy.agent_return_s if asked else HOLD_RETRY_S)


def hold_version(state: State, action: HoldVersion, now: Seconds) -> None:
    """It was told to get it. An order before that it did not answer has failed."""
    book, machine = state.versions[action.version], state.machines[action.machine]
    if action.machine in book.asked:
        for key, order in list(state.outstanding.items()):
            if not isinstance(order, HoldVersion) or order.version != action.version:
                continue
            if order.machine == action.machine:
                del state.outstanding[key]
                if machine.silent_since <= book.asked[action.machine]:  # else it may not know of it
                    _count_failed(book, action.machine, "it did not say what came of it")
    state.outstanding[action.id] = action
    book.asked[action.machine] = now
    if machine.versions is not None:
        machine.versions = _kept(machine.versions, action)


# --- time ----------------------------------------------------------------------------------------


def deadlines(state: State) -> Iterator[Seconds]:
    """When somebody is asked again, or waited for no more."""
    crowded = crowded_until(state) if state.versions else 0.0
    yield crowded
    if crowded:
        return
    wanted = [state.versions[version] for version in _wanted(state)]
    under_way = _under_way(state) if any(book.asked for book in wanted) else {}
    for book in wanted:
        version = book.code.version
        for name in book.asked:
            machine = state.machines.get(name)
            if machine is not None and machine.connected and usable(machine):
                asked = (name, version) in under_way
                yield _again_at(state, book, machine, asked=asked)
    if pending(state) or state.rollback is not None:
        for name in state.silent:
            yield state.machines[name].silent_since + state.job.policy.hold_within_s
