"""The guards: how many may be evicted at once, and whom an accusation really means.

False evictions are the expensive mistake. Asked by evicting.py with all that speaks against
machines; it answers with groups that go together, or with what speaks against that:

1. an accusation of a kernel means every machine on it (local stand-ins share one), and one of a
   part of its host, a GPU say, means those that name the same part;
2. accusations of most of one switch or rack, and of few machines outside, mean that unit;
3. too many at once, or most of the job for the same cause, are not the machines but what they
   share;
4. nobody is evicted without a machine that can take the place.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from everstep.core.alerts import (
    BOOT,
    BY_ITSELF,
    Accusation,
    accusations,
    doubts,
    struck_lately,
    usable,
)
from everstep.core.state import Machine, State
from everstep.model import JobSpec, MachineId, Seconds, Value

MOST = 0.5
"""Accusations of more than this share of a unit mean the unit (ByteRobust evicts by switch)."""
OUTSIDE_SHARE = 0.1
"""Of the accused, or one machine: so many may lie outside of that unit, by chance."""
NAMES_MAX = 6
NO_STANDBY = "no standby is ready"


class Group(Value, frozen=True, kw_only=True):
    """Machines that are evicted together, or not at all."""

    machines: tuple[MachineId, ...]
    accusation: Accusation
    """The first."""
    unit: str = ""
    """What they are: "switch:leaf7". Empty: one machine by itself, or some that are refused."""
    why: str
    against: str = ""
    """Why they are not evicted; empty if they are."""
    too_many: bool = False
    """They are refused because it is not the machines."""

    @property
    def about(self) -> str:
        """Key of the matter for people: one however many follow."""
        return f"accused: {'many' if self.too_many else self.unit or named(self.machines)}"


def groups_of(state: State, accused: Sequence[Accusation], now: Seconds) -> list[Group]:
    """What to do about all that machines are accused of, the oldest accusation first."""
    if not accused:
        return []
    in_time = sorted(accused, key=lambda each: each.at)
    return _Guard(state, in_time, now).groups()


def named(machines: Sequence[MachineId]) -> str:
    """Names, or the first of very many."""
    shown = ", ".join(machines[:NAMES_MAX])
    more = len(machines) - NAMES_MAX
    return f"{shown} and {more} more" if more > 0 else shown


def waits_until(state: State, cause: str, at: Seconds, *, struck: bool) -> Seconds:
    """When ranks that run are stopped for it: later if others may yet say the same.

    At a full second: what many say within one is one moment.
    """
    of_kernel = cause.startswith(BOOT)
    shared = (state.job.local and _part_in(cause)) if of_kernel else cause
    policy = state.job.policy
    if not shared and not struck:
        return at
    wait_s = policy.common_cause_s if shared else policy.strikes_together_s
    return float(math.ceil(at + wait_s))


def ready_standbys(state: State, now: Seconds) -> list[Machine]:
    """Standbys that nothing speaks against."""
    return [machine for machine in state.standbys() if not doubts(state, machine, now)]


def most_accused(job: JobSpec) -> float:
    """More at once are not the machines."""
    return max(job.policy.accused_max, job.policy.accused_share * job.nnodes)


def lies_in(machine: Machine, unit: str) -> bool:
    """Whether the machine is a part of this unit."""
    return unit in machine.units or (bool(machine.boot_id) and unit == BOOT + machine.boot_id)


class _Guard:
    """One question."""

    def __init__(self, state: State, accused: Sequence[Accusation], now: Seconds) -> None:
        self._state = state
        self._accused = accused
        self._now = now
        self._most = most_accused(state.job)
        since = now - state.job.policy.accusers_within_s
        self._lately = [*accusations(state, now, since), *accused]
        """Also what is over: when a storage comes back, the last to say so are not the machines."""
        self._gone = {each.unit or each.machine for each in state.expelled if each.at > since}
        """Who went lately, or goes now; units count once."""
        names = {each.machine for each in accused}
        self._ready = [m for m in ready_standbys(state, now) if m.machine not in names]
        self._wanted = state.job.nnodes - len(state.positions)
        """Positions that a standby is needed for already."""

    def groups(self) -> list[Group]:
        left = list(self._accused)
        found = self._kernels(left)
        kernels = {group.unit for group in found}
        left = [each for each in _without(left, found) if each.cause not in kernels]
        found += self._unit(left)
        left = _without(left, found)
        self._lately = [e for e in _without(self._lately, found) if e.cause not in kernels]
        return [*found, *self._one_by_one(left)]

    # --- whom it means ---

    def _kernels(self, accused: Sequence[Accusation]) -> list[Group]:
        """Kernels first: who goes with one needs no other reason."""
        alike: dict[str, list[Accusation]] = {}
        for each in accused:
            if each.cause.startswith(BOOT):
                alike.setdefault(each.cause, []).append(each)
        found: list[Group] = []
        going: set[MachineId] = set()
        for cause, said in sorted(alike.items(), key=lambda item: bool(_part_in(item[0]))):
            part = _part_in(cause)
            machines = self._who_say(said) if part else self._in_unit(cause)
            machines = [machine for machine in machines if machine.machine not in going]
            if len(machines) < 2:
                continue
            share = f"share {part} of one host" if part else "run on one kernel"
            why = f"{named(_names(machines))} {share}, and {said[0].why}"
            found.append(self._together(machines, said[0], cause, why))
            if not found[-1].against:
                going.update(_names(machines))
        return found

    def _who_say(self, accused: Iterable[Accusation]) -> list[Machine]:
        return [self._state.machines[name] for name in {each.machine: None for each in accused}]

    def _unit(self, accused: Sequence[Accusation]) -> Iterator[Group]:
        """The smallest unit that the accusations mean, if it can go as one."""
        names = {each.machine for each in accused}
        for unit, machines in self._units_of(names):
            outside = len(names) - sum(machine.machine in names for machine in machines)
            if outside > max(1, OUTSIDE_SHARE * len(names)):
                continue
            group = self._as_one(unit, machines, accused)
            if group is not None and not group.against:
                yield group
                return

    def _units_of(self, names: set[MachineId]) -> list[tuple[str, list[Machine]]]:
        """The units of these machines with all their usable machines, the smallest first."""
        units: dict[str, list[Machine]] = {
            unit: [] for name in names for unit in self._state.machines[name].units
        }
        for machine in self._state.machines.values() if units else ():
            for unit in machine.units:
                if unit in units and usable(machine):
                    units[unit].append(machine)
        return sorted(units.items(), key=lambda item: (len(item[1]), item[0]))

    def _as_one(
        self, unit: str, machines: Sequence[Machine], accused: Sequence[Accusation]
    ) -> Group | None:
        """None: the accusations do not mean this unit."""
        names = set(_names(machines))
        inside = [each for each in accused if each.machine in names]
        newest_at = max(each.at for each in inside)
        within_s = self._state.job.policy.accusers_within_s
        hit = {each.machine for each in inside if newest_at - each.at <= within_s}
        everybody = {each.machine for each in accused}
        if any(each.struck for each in inside):
            # The second strike of the others is under way, if it is their switch.
            struck = struck_lately(self._state, self._now)
            hit |= struck & names
            everybody |= struck
        few_outside = len(everybody - names) <= max(1, OUTSIDE_SHARE * len(everybody))
        if len(hit) < 2 or len(hit) <= MOST * len(machines) or not few_outside:
            return None
        first = inside[0]
        why = f"{len(hit)} of the {len(machines)} machines of {unit} are accused: {first.why}"
        return self._together(machines, first, unit, why)

    def _in_unit(self, unit: str) -> list[Machine]:
        machines = self._state.machines.values()
        return [m for m in machines if usable(m) and lies_in(m, unit)]

    def _one_by_one(self, left: Sequence[Accusation]) -> Iterator[Group]:
        too_many: list[Accusation] = []
        for each, near in self._with_near(left):
            many = len(near) > self._most or len(self._gone.union(near)) > self._most
            if many or self._is_shared(each.cause):
                too_many.append(each)
                continue
            machine = self._state.machines[each.machine]
            yield self._together([machine], each, "", each.why)
        if too_many:
            yield self._not_the_machines(too_many)

    def _is_shared(self, cause: str) -> bool:
        """Whether most of the job names the same: of a small one, that may be two machines."""
        same = {each.machine for each in self._lately if cause and each.cause == cause}
        return len(same) > 1 and 2 * len(same) > self._state.job.nnodes

    def _with_near(
        self, accused: Sequence[Accusation]
    ) -> Iterator[tuple[Accusation, Mapping[MachineId, int]]]:
        """The first accusation of each machine, and all machines accused not long before or after.

        All are in order of time, so a window moves over them once, however many they are.
        """
        within_s = self._state.job.policy.accusers_within_s
        lately = sorted(self._lately, key=lambda each: each.at)
        near: Counter[MachineId] = Counter()
        seen: set[MachineId] = set()
        begin = end = 0
        for each in accused:
            while end < len(lately) and lately[end].at <= each.at + within_s:
                near[lately[end].machine] += 1
                end += 1
            while lately[begin].at < each.at - within_s:
                near[lately[begin].machine] -= 1
                if not near[lately[begin].machine]:
                    del near[lately[begin].machine]
                begin += 1
            if each.machine not in seen:
                seen.add(each.machine)
                yield each, near

    # --- what speaks against it ---

    def _together(
        self, machines: Sequence[Machine], first: Accusation, unit: str, why: str
    ) -> Group:
        against = self._objection(machines, unit)
        if not against:
            self._gone.update([unit] if unit else _names(machines))
            self._ready = self._ready_without(machines)
            self._wanted += _members(machines)
        return Group(
            machines=tuple(_names(machines)),
            accusation=first,
            unit=unit,
            why=why,
            against=against,
        )

    def _objection(self, machines: Sequence[Machine], unit: str) -> str:
        if unit and len(self._gone | {unit}) > self._most:
            return f"{len(self._gone)} evictions within {self._minutes} minutes are enough"
        if not _members(machines) and not unit:
            return ""  # a standby that is broken is none
        ready = len(self._ready_without(machines))
        if ready >= self._wanted + _members(machines):
            return ""
        if unit.startswith(BOOT) and len(machines) > _members(machines):
            return f"the standbys {'share it' if _part_in(unit) else 'run on the same kernel'}"
        return NO_STANDBY

    def _ready_without(self, machines: Sequence[Machine]) -> list[Machine]:
        going = set(_names(machines))
        return [machine for machine in self._ready if machine.machine not in going]

    @property
    def _minutes(self) -> str:
        return f"{self._state.job.policy.accusers_within_s / 60:g}"

    def _not_the_machines(self, too_many: Sequence[Accusation]) -> Group:
        names = list(dict.fromkeys(each.machine for each in too_many))
        count = len(self._gone | {each.machine for each in self._lately})
        against = (
            f"{count} machines were accused within {self._minutes} minutes, which is not the"
            f" machines: {self._shared(too_many)}"
        )
        return Group(
            machines=tuple(names),
            accusation=too_many[0],
            why=too_many[0].why,
            against=against,
            too_many=True,
        )

    def _shared(self, accused: Sequence[Accusation]) -> str:
        """What all of them share, as far as they say."""
        if len(accused) > 1:
            if cause := _only(each.cause for each in accused):
                return f"all of them name {cause}"
            source = _only(each.source for each in accused)
            if source and source != BY_ITSELF:
                return f"{source} alone says all of it"
            machines = [self._state.machines[each.machine] for each in accused]
            for unit in machines[0].units:
                if all(unit in machine.units for machine in machines):
                    return f"all of them are of {unit}"
        return "a switch, a driver, the code"


def _part_in(cause: str) -> str:
    """The part of a host that the cause names beside its kernel; empty: none."""
    return cause.removeprefix(BOOT).partition(" ")[2]


def _without(accused: Iterable[Accusation], groups: Iterable[Group]) -> list[Accusation]:
    """What is left for those who do not go anyway."""
    going = {name for group in groups if not group.against for name in group.machines}
    return [each for each in accused if each.machine not in going]


def _names(machines: Iterable[Machine]) -> list[MachineId]:
    return [machine.machine for machine in machines]


def _members(machines: Iterable[Machine]) -> int:
    return sum(machine.node_rank is not None for machine in machines)


def _only(texts: Iterable[str]) -> str:
    """The one that all are; empty if they differ."""
    found = set(texts)
    return found.pop() if len(found) == 1 else ""
