"""Checks of memory, disks, file systems, clock and processes of the host."""

from __future__ import annotations

from everstep.agent.checks.check import MakeCheck, MakeSource
from everstep.agent.checks.host.cgroup import OwnCgroup
from everstep.agent.checks.host.clock import ClockRight
from everstep.agent.checks.host.cpu import CpuSpeed
from everstep.agent.checks.host.disk import Disk
from everstep.agent.checks.host.dstate import Dstate
from everstep.agent.checks.host.edac import MemoryErrors
from everstep.agent.checks.host.handles import Handles
from everstep.agent.checks.host.load import Overload
from everstep.agent.checks.host.memory import Memory
from everstep.agent.checks.host.mounts import MountsThere
from everstep.agent.checks.host.oom import Oom
from everstep.agent.checks.host.oom_anywhere import OomAnywhere
from everstep.agent.checks.host.open_files import RanksOpenFiles
from everstep.agent.checks.host.pressure import Pressures
from everstep.agent.checks.host.readonly import ReadOnly
from everstep.agent.checks.host.services import Services
from everstep.agent.checks.host.source_cgroup import Cgroup
from everstep.agent.checks.host.source_clock import Clock
from everstep.agent.checks.host.source_cpu import Cpu
from everstep.agent.checks.host.source_edac import Edac
from everstep.agent.checks.host.source_load import Load
from everstep.agent.checks.host.source_mounts import Mounts
from everstep.agent.checks.host.source_proc import Proc
from everstep.agent.checks.host.source_processes import Processes
from everstep.agent.checks.host.storage import Storage
from everstep.agent.checks.host.zombies import Zombies

SOURCES: tuple[MakeSource, ...] = (Proc, Load, Cgroup, Mounts, Clock, Processes, Edac, Cpu)
CHECKS: tuple[MakeCheck, ...] = (
    Memory,
    OomAnywhere,
    Overload,
    Pressures,
    Handles,
    Oom,
    OwnCgroup,
    Storage,
    MountsThere,
    ReadOnly,
    Disk,
    ClockRight,
    Dstate,
    Zombies,
    RanksOpenFiles,
    Services,
    MemoryErrors,
    CpuSpeed,
)
