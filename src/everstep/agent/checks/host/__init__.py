"""Checks of memory, disks, file systems, clock and processes of the host."""

from __future__ import annotations

from everstep.agent.checks.check import MakeCheck, MakeSource

SOURCES: tuple[MakeSource, ...] = ()
CHECKS: tuple[MakeCheck, ...] = ()
