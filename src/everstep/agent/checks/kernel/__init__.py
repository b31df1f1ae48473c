"""Checks of the kernel log: what drivers and the kernel itself report."""

from __future__ import annotations

from everstep.agent.checks.check import MakeCheck, MakeSource
from everstep.agent.checks.kernel.clients import ClientsSource, FuseCheck, LustreCheck
from everstep.agent.checks.kernel.log import KernelLogCheck
from everstep.agent.checks.kernel.oom import OomCheck
from everstep.agent.checks.kernel.panic import PanicCheck
from everstep.agent.checks.kernel.reader import ReaderCheck
from everstep.agent.checks.kernel.source import KernelSource
from everstep.agent.checks.kernel.state import KernelStateCheck, KernelStateSource
from everstep.agent.checks.kernel.xid import SxidCheck, XidCheck

SOURCES: tuple[MakeSource, ...] = (KernelSource, KernelStateSource, ClientsSource)
CHECKS: tuple[MakeCheck, ...] = (
    KernelLogCheck,
    XidCheck,
    SxidCheck,
    OomCheck,
    PanicCheck,
    KernelStateCheck,
    ReaderCheck,
    LustreCheck,
    FuseCheck,
)
