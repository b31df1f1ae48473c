"""The words of every check of a machine: what it found, and what may become an alert.

agent/checks/ makes results, the monitor there makes alerts of those that matter, core/alerts.py
decides by them, `everstep check` prints them. Findings of other people's monitors become alerts as
well. The verdicts are those of diagnosis: one vocabulary for checks, rules and tests.
"""

from __future__ import annotations

from enum import StrEnum

from everstep.diagnosis.words import Category, Verdict
from everstep.model import Seconds, Value


class Counts(StrEnum):
    """When a result that is no verdict against its machine by itself becomes one."""

    NEVER = "never"
    """It is recorded, and weighs when something else fails."""
    TWICE = "twice"
    """Two within five minutes evict, one is tolerated: links heal (ByteRobust, 4.1)."""
    WITH_SLOWDOWN = "with_slowdown"
    """Together with falling throughput: a hot GPU alone is no failure (ByteRobust, 8.1.1)."""


class Result(Value, frozen=True, kw_only=True):
    """What one check says of one item, from one sample.

    `verdict` INFO is a pass, ERROR says that the check could not run, everything else is a fail.
    """

    check: str
    """Name of the check, for example "net.link"."""
    item: str = ""
    """What it looked at: "eth0", "GPU 0000:3b:00.0", "/data". Empty: the machine."""
    verdict: Verdict
    why: str
    """One clause with its numbers."""
    do: str = ""
    """What somebody should do about it, as a sentence; empty for a pass."""
    category: Category = Category.NONE
    counts: Counts = Counts.NEVER
    cause: str = ""
    """What machines with the same result may have in common, if that is more than themselves:
    "boot 5f3a..." (a host), "boot 5f3a... 0000:3b:00.0" (a device of it), "nfs server:/data",
    "driver 570.86". Accusers with the same cause are one."""
    values: dict[str, float] = {}
    """Its numbers, for metrics: name with unit -> value."""

    @property
    def failed(self) -> bool:
        """Whether something is wrong; False also if the check could not run."""
        return self.verdict not in {Verdict.INFO, Verdict.ERROR}

    @property
    def key(self) -> tuple[str, str]:
        """What later results replace this one."""
        return self.check, self.item


class Alert(Value, frozen=True, kw_only=True):
    """A failed result that the controller is told of."""

    result: Result
    source: str = "agent"
    """Who says so: "agent", "node service", or the name of somebody else's monitor."""
    age_s: Seconds = 0.0
    """How long ago it was seen."""
