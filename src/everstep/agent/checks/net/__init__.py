"""Checks of network interfaces, InfiniBand and RoCE ports, and of who can be reached."""

from __future__ import annotations

from everstep.agent.checks.check import MakeCheck, MakeSource

SOURCES: tuple[MakeSource, ...] = ()
CHECKS: tuple[MakeCheck, ...] = ()
