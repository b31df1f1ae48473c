"""What holds a simulated rank up for ever, and what only looks like it: healthy pauses.

training.py comes no further for either, looking.py shows both in stacks, blame.py tells them apart.
"""

from __future__ import annotations

from enum import StrEnum

from everstep.model import RankPhase, Seconds, Step, Value


class Hold(StrEnum):
    """Why one rank does nothing any more while all others wait for it."""

    STOPPED = "stopped by a signal"
    KERNEL = "stuck in the kernel"
    """SIGKILL does nothing either."""
    LOADER = "a worker of its data loader is stopped"
    LOCK = "in a wait for a lock that nobody gives back"
    """The code did it: another machine would hang as well."""


OF_MACHINES = (Hold.STOPPED, Hold.KERNEL, Hold.LOADER)


class Held(Value, frozen=True, kw_only=True):
    """A rank that is held up, or was."""

    hold: Hold
    since: Seconds
    until: Seconds = float("inf")


class Pause(Value, frozen=True, kw_only=True):
    """Something healthy that takes longer than steps do."""

    phase: RankPhase
    every: int
    """It comes after so many steps; 0: before the first step of each generation."""
    takes_s: Seconds
    declared: bool
    """The script says that it does it."""
    alone: bool = False
    """Rank 0 does it, and all others wait for it in a collective."""

    def comes_after(self, done: Step) -> bool:
        """Whether it comes now, after so many steps."""
        return self.every > 0 and done % self.every == self.every - 1


class Pausing(Value, frozen=True, kw_only=True):
    """A pause, now."""

    pause: Pause
    since: Seconds
    until: Seconds

    def at(self, now: Seconds) -> bool:
        return self.since <= now < self.until
