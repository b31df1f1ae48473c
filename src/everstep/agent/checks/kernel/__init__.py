"""Checks of the kernel log: what drivers and the kernel itself report."""

from __future__ import annotations

from everstep.agent.checks.check import MakeCheck, MakeSource

SOURCES: tuple[MakeSource, ...] = ()
CHECKS: tuple[MakeCheck, ...] = ()
