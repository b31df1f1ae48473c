"""Who ever said enough of a machine to evict it: by itself, from events alone.

For invariants.py, which must not believe the core's own books (alerts.py) about it. It asks for
less than the core does: that something was said, not that it still holds.
"""

from __future__ import annotations

from itertools import combinations

from everstep.diagnosis.words import Verdict
from everstep.events import (
    AlertRaised,
    ControllerEvent,
    EvidenceFound,
    MachineJoined,
    StartFailed,
)
from everstep.health import Counts
from everstep.model import MachineId, Seconds

APART_S: Seconds = 1.0
"""Two occurrences are at least this far apart, whatever the policy's number is."""


class Witnesses:
    """Hears every event of a journal."""

    def __init__(self) -> None:
        self.machines: dict[MachineId, None] = {}
        """Of which anything was said."""
        self._enough: dict[MachineId, None] = {}
        self._struck: dict[MachineId, list[Seconds]] = {}
        self._not_started: dict[MachineId, int] = {}
        self._printed = False
        self._boots: dict[MachineId, str] = {}

    def hear(self, event: ControllerEvent, now: Seconds) -> None:
        if isinstance(event, EvidenceFound):
            self._printed = True
            self.machines[event.machine] = None
        elif isinstance(event, AlertRaised):
            self._hear_alert(event, now)
        elif isinstance(event, StartFailed):
            failed = self._not_started
            failed[event.machine] = failed.get(event.machine, 0) + 1
            self.machines[event.machine] = None
        elif isinstance(event, MachineJoined):
            former = self._boots.get(event.machine)
            if former and event.boot_id and former != event.boot_id:
                self.machines[event.machine] = self._enough[event.machine] = None
            self._boots[event.machine] = event.boot_id or former or ""

    def _hear_alert(self, event: AlertRaised, now: Seconds) -> None:
        self.machines[event.machine] = None
        result = event.alert.result
        slow = result.counts is Counts.WITH_SLOWDOWN
        if result.verdict is Verdict.EVICT or slow:
            self._enough[event.machine] = None
        elif result.counts is Counts.TWICE and result.verdict in (Verdict.WARN, Verdict.SUSPECT):
            at = now - max(0.0, event.alert.age_s)
            self._struck.setdefault(event.machine, []).append(at)

    def spoke_against(self, machine: MachineId) -> bool:
        """Whether somebody said enough. What ranks print may accuse any machine."""
        strikes = self._struck.get(machine, [])
        twice = any(abs(a - b) > APART_S for a, b in combinations(strikes, 2))
        twice = twice or self._not_started.get(machine, 0) > 1
        return self._printed or machine in self._enough or twice
