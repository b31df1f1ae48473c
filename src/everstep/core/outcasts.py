"""What must hold of evicted machines, from events and decisions alone.

For invariants.py, which must not believe the core's own books (quarantine.py) about it. It knows
who is evicted, hosts that came back under another name included, and asks for less than the core
does: that ranks were proven gone before a test, and that tests were passed before a return.
"""

from __future__ import annotations

from everstep.actions import (
    ControllerAction,
    EvictMachine,
    GiveVerdict,
    ReturnMachine,
    StartRanks,
    StopRanks,
    TestMachine,
)
from everstep.events import (
    ControllerEvent,
    JobSubmitted,
    MachineJoined,
    MachineLost,
    MachineTested,
    RanksStopped,
)
from everstep.model import NO_GENERATION, Generation, JobSpec, MachineId, Seconds


class Outcasts:
    """Hears every event and sees every decision of a journal."""

    def __init__(self) -> None:
        self.why: dict[MachineId, str] = {}
        """Machines that are evicted now, and why."""
        self._spec: JobSpec | None = None
        self._hosts: dict[MachineId, str] = {}
        self._blocked: dict[str, MachineId] = {}
        """Hosts whose last eviction stands -> the machine that they were."""
        self._stops: dict[str, StopRanks] = {}
        self._tests: dict[str, MachineId] = {}
        self._started: dict[MachineId, Generation] = {}
        self._proven: dict[MachineId, Generation] = {}
        self._passed: dict[MachineId, list[Seconds]] = {}
        self._failed: dict[MachineId, None] = {}
        self._judged: dict[MachineId, None] = {}

    def hear(self, event: ControllerEvent, now: Seconds) -> None:
        if isinstance(event, JobSubmitted):
            self._spec = event.spec
        elif isinstance(event, MachineJoined):
            self._joined(event)
        elif isinstance(event, MachineLost):
            # Lost before it joined: should it come after all, it is evicted for that.
            self._hosts.setdefault(event.machine, "")
        elif isinstance(event, RanksStopped):
            order = self._stops.get(event.action)
            if order is not None and order.machine == event.machine:
                before = self._proven.get(event.machine, NO_GENERATION)
                self._proven[event.machine] = max(before, order.generation)
        elif isinstance(event, MachineTested) and self._tests.get(event.action) == event.machine:
            if event.passed:
                self._passed.setdefault(event.machine, []).append(now)
            elif event.passed is False:
                self._failed[event.machine] = None

    def _joined(self, event: MachineJoined) -> None:
        """Whoever comes from a host that was evicted is evicted as well."""
        new = event.machine not in self._hosts
        self._hosts[event.machine] = event.host
        if not new or self._spec is None or self._spec.local or event.host not in self._blocked:
            return
        others = [n for n, host in self._hosts.items() if host == event.host and n != event.machine]
        if all(other in self.why for other in others):
            self.why[event.machine] = f"its host was evicted as {self._blocked[event.host]}"

    def problem(self, action: ControllerAction) -> str:
        """What is wrong with this decision, if it is about one of them; then take note of it."""
        said = self._wrong_with(action)
        if isinstance(action, StopRanks):
            self._stops[action.id] = action
        elif isinstance(action, StartRanks):
            self._started[action.machine] = action.generation
        elif isinstance(action, TestMachine):
            self._tests[action.id] = action.machine
        elif isinstance(action, GiveVerdict):
            self._judged[action.machine] = None
        elif isinstance(action, EvictMachine):
            self._evict(action)
        elif isinstance(action, ReturnMachine):
            self.why.pop(action.machine, None)
            self._blocked.pop(self._hosts.get(action.machine, ""), None)
        return said

    def _evict(self, action: EvictMachine) -> None:
        self.why[action.machine] = action.why
        for books in (self._passed, self._failed, self._judged):
            books.pop(action.machine, None)
        host = self._hosts.get(action.machine)
        if host:
            self._blocked[host] = action.machine

    def _wrong_with(self, action: ControllerAction) -> str:
        if isinstance(action, EvictMachine):
            twice = action.machine in self.why
            return f"{action.machine} was evicted twice" if twice else ""
        if not isinstance(action, TestMachine | GiveVerdict | ReturnMachine):
            return ""
        if action.machine not in self.why:
            return f"{type(action).__name__} {action.id} is of {action.machine}, not evicted"
        if isinstance(action, TestMachine):
            return self._untimely(action.machine)
        guilty = isinstance(action, GiveVerdict) and action.guilty
        return self._judged_twice(action) or self._unfounded(action.machine, guilty=guilty)

    def _judged_twice(self, action: ControllerAction) -> str:
        again = isinstance(action, GiveVerdict) and action.machine in self._judged
        return f"{action.id} is a second verdict" if again else ""

    def _untimely(self, name: MachineId) -> str:
        started = self._started.get(name, NO_GENERATION)
        proven = self._proven.get(name, NO_GENERATION)
        if started and proven <= started:
            return f"{name} is tested, and its ranks of generation {started} are not proven gone"
        return ""

    def _unfounded(self, name: MachineId, *, guilty: bool) -> str:
        """Why it is neither guilty nor innocent."""
        assert self._spec is not None
        if guilty:
            return "" if name in self._failed else f"{name} is guilty and failed no test"
        passed = self._passed.get(name, [])
        if len(passed) < 2 or passed[-1] - passed[0] < self._spec.policy.retest_after_s:
            return f"{name} returns or is innocent, and passed tests at {passed} only"
        return ""
