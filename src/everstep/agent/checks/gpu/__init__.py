"""Checks of GPUs, by NVML."""

from __future__ import annotations

from everstep.agent.checks.check import MakeCheck, MakeSource

SOURCES: tuple[MakeSource, ...] = ()
CHECKS: tuple[MakeCheck, ...] = ()
