"""Source "proc": memory of the machine, and processes that ran out of it.

Sampled in the agent's loop every two seconds, the interval of ByteRobust for its host checks.
Judged by memory.py and oom_anywhere.py.
"""

from __future__ import annotations

from typing import ClassVar

from everstep.agent.checks.check import Here, NotReadable, Source
from everstep.agent.checks.host.reading import missing, read, readable, table
from everstep.model import Seconds, Value


class ProcSample(Value, frozen=True, kw_only=True):
    """Of one moment."""

    total: int
    """Bytes of memory that the machine has."""
    available: int
    """Bytes that a program could still get without swapping, as the kernel estimates it."""
    oom_kills: int | None = None
    """Processes ended for want of memory since the boot; None: this kernel does not tell."""


class Proc(Source[ProcSample]):
    """Reads /proc/meminfo and /proc/vmstat."""

    name: ClassVar[str] = "proc"
    kind: ClassVar[type[Value]] = ProcSample
    every_s: ClassVar[Seconds] = 2.0

    def absent(self, here: Here) -> str:
        return "there is no /proc/meminfo" if missing(here, "/proc/meminfo") else ""

    def sample(self, here: Here) -> ProcSample:
        memory = table(read(here, "/proc/meminfo"))
        if not memory.get("MemTotal") or "MemAvailable" not in memory:
            raise NotReadable("/proc/meminfo does not say how much memory there is")
        events = readable(lambda: table(read(here, "/proc/vmstat"))) or {}
        return ProcSample(
            total=memory["MemTotal"] * 1024,
            available=memory["MemAvailable"] * 1024,
            oom_kills=events.get("oom_kill"),
        )
