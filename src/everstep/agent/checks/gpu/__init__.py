"""Checks of GPUs, by NVML."""

from __future__ import annotations

from everstep.agent.checks.check import MakeCheck, MakeSource
from everstep.agent.checks.gpu.answers import Answers
from everstep.agent.checks.gpu.clocks import Clocks
from everstep.agent.checks.gpu.dcgm import Dcgm, DcgmSource
from everstep.agent.checks.gpu.driver import Driver
from everstep.agent.checks.gpu.ecc import EccUncorrected, SramThreshold
from everstep.agent.checks.gpu.ecc_corrected import EccCorrected
from everstep.agent.checks.gpu.events import XidSource
from everstep.agent.checks.gpu.fabric import Fabric
from everstep.agent.checks.gpu.inventory import Inventory
from everstep.agent.checks.gpu.lost import Lost
from everstep.agent.checks.gpu.memory_left import MemoryLeft
from everstep.agent.checks.gpu.needs_reset import NeedsReset
from everstep.agent.checks.gpu.nvlink import NvLink
from everstep.agent.checks.gpu.nvlink_errors import NvLinkErrors
from everstep.agent.checks.gpu.nvml import NvmlSource
from everstep.agent.checks.gpu.pcie_link import PcieLink
from everstep.agent.checks.gpu.pcie_replay import PcieReplay
from everstep.agent.checks.gpu.power import Power
from everstep.agent.checks.gpu.recovery import Recovery
from everstep.agent.checks.gpu.remap import Remap
from everstep.agent.checks.gpu.retired_pages import RetiredPages
from everstep.agent.checks.gpu.settings import Settings
from everstep.agent.checks.gpu.temperature import Temperature
from everstep.agent.checks.gpu.tensor import Tensor
from everstep.agent.checks.gpu.throttle import Throttle
from everstep.agent.checks.gpu.xid import XidByNvml

SOURCES: tuple[MakeSource, ...] = (NvmlSource, XidSource, DcgmSource)
CHECKS: tuple[MakeCheck, ...] = (
    Answers,
    Driver,
    Lost,
    NeedsReset,
    Recovery,
    Inventory,
    XidByNvml,
    EccUncorrected,
    SramThreshold,
    EccCorrected,
    Remap,
    RetiredPages,
    NvLink,
    NvLinkErrors,
    Fabric,
    PcieLink,
    PcieReplay,
    Temperature,
    Throttle,
    Clocks,
    Power,
    MemoryLeft,
    Settings,
    Tensor,
    Dcgm,
)
