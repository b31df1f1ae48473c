"""Quiet jobs: when an agent says that its ranks do nothing, and what that means for the whole job.

agent.py asks Telling what to report of one machine, intake.py folds those reports with AllQuiet
into one fact for the controller's core. A job that works costs neither a report nor a fact.
"""

from __future__ import annotations

from collections.abc import Iterable

from everstep.core.agent_io import ActivityRead
from everstep.model import NO_GENERATION, Generation, MachineId, PolicySpec, Seconds
from everstep.sightings import ActivitySeen, MachineActivity

FROM_S: Seconds = 10.0
"""Quiet for so long is told, or for as long as the policy wants to know of if that is less."""
EVERY_S: Seconds = 5.0
"""Between two reports while it lasts."""
OLD_S: Seconds = 3 * EVERY_S
"""A machine that has said nothing for so long is not known to be quiet any more: its agent was
replaced, or nobody hears it."""


class Telling:
    """What one agent has said of its ranks."""

    def __init__(self) -> None:
        self._at: Seconds | None = None
        """When it last said that they are quiet; None: they are not, as far as it said."""

    def ranks_start(self) -> None:
        """Of the ones before nothing needs to be said any more."""
        self._at = None

    def take(
        self, machine: MachineId, event: ActivityRead, policy: PolicySpec, now: Seconds
    ) -> MachineActivity | None:
        """What to report: they are quiet, or just began to do something again."""
        quiet = event.quiet_s >= min(FROM_S, policy.quiet_s)
        if quiet and self._at is not None and now - self._at < EVERY_S:
            return None
        if not quiet and self._at is None:
            return None
        self._at = now if quiet else None
        return MachineActivity(
            machine=machine,
            generation=event.generation,
            quiet_s=event.quiet_s if quiet else 0.0,
            no_traffic_s=event.no_traffic_s,
            idle_s=event.idle_s,
        )


class AllQuiet:
    """What all machines of the newest generation said, and what was made of it."""

    def __init__(self) -> None:
        self._generation: Generation = NO_GENERATION
        self._quiet: dict[MachineId, tuple[MachineActivity, Seconds]] = {}
        """In the order in which they were heard last: ten thousand of them cost nothing."""
        self._told_at: Seconds | None = None
        """When it was told that all are quiet; None: they are not, as far as it was told."""

    def take(self, report: MachineActivity, machines: int, now: Seconds) -> ActivitySeen | None:
        """Take what one of so many machines said; the fact to give to the core, if one is due."""
        if report.generation < self._generation:
            return None
        if report.generation > self._generation:
            self._generation = report.generation
            self._quiet.clear()
            self._told_at = None
        self._quiet.pop(report.machine, None)
        if report.quiet_s > 0:
            self._quiet[report.machine] = (report, now)
        return self.due(machines, now)

    def due(self, machines: int, now: Seconds) -> ActivitySeen | None:
        """What is to be told now: all are quiet, or not any more."""
        while self._quiet and now >= self._oldest_at() + OLD_S:
            del self._quiet[next(iter(self._quiet))]
        if len(self._quiet) < machines:
            if self._told_at is None:
                return None
            self._told_at = None
            return ActivitySeen(generation=self._generation, quiet_s=0.0)
        if self._told_at is not None and now - self._told_at < EVERY_S:
            return None
        self._told_at = now
        return self._seen(now)

    def next_deadline(self) -> Seconds | None:
        """When it will be over unless all machines say again that they are quiet."""
        if self._told_at is None:
            return None
        return self._oldest_at() + OLD_S

    def _oldest_at(self) -> Seconds:
        return next(iter(self._quiet.values()))[1]

    def _seen(self, now: Seconds) -> ActivitySeen:
        """The smallest of each, as they are now."""
        said = self._quiet.values()
        quiet_s = _shortest((each.quiet_s, now - at) for each, at in said)
        assert quiet_s is not None, "each machine said for how long"
        return ActivitySeen(
            generation=self._generation,
            quiet_s=quiet_s,
            no_traffic_s=_shortest((each.no_traffic_s, now - at) for each, at in said),
            idle_s=_shortest((each.idle_s, now - at) for each, at in said),
        )


def _shortest(said: Iterable[tuple[Seconds | None, Seconds]]) -> Seconds | None:
    """Of (how long, said so long ago); None if one of them cannot be told."""
    each = [None if for_s is None else for_s + ago_s for for_s, ago_s in said]
    known = [for_s for for_s in each if for_s is not None]
    return min(known) if len(known) == len(each) else None
