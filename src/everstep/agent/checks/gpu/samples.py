"""What the GPU sources tell of: all GPUs of a machine at one moment, and XIDs as they come.

nvml.py and events.py take these samples in child processes; the checks beside them judge them.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from math import isfinite

from everstep.agent.checks.xids import XidEvent, gpu_item
from everstep.model import Seconds, Value


class Code(IntEnum):
    """Return codes of NVML that mean something to a check (nvml.h, nvmlReturn_t)."""

    UNINITIALIZED = 1
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    INSUFFICIENT_POWER = 8
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    IRQ_ISSUE = 11
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    CORRUPTED_INFOROM = 14
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    LIB_RM_VERSION_MISMATCH = 18


class Signal(StrEnum):
    """The numbers of one GPU. Which of them exist depends on GPU and driver."""

    IDENTITY = "identity"
    """No number: errors of handle, address, UUID and serial number stand under this name."""
    PROCESSES = "processes"
    """Likewise, for the list of processes."""
    UTIL_PERCENT = "util_percent"
    """Share of time with a kernel on the GPU, one that only waits included."""
    TEMPERATURE_C = "temperature_c"
    MEMORY_TEMPERATURE_C = "memory_temperature_c"
    SLOWDOWN_AT_C = "slowdown_at_c"
    SHUTDOWN_AT_C = "shutdown_at_c"
    MARGIN_C = "margin_c"
    """Degrees below the highest permitted temperature; newer GPUs give this."""
    SLOWDOWN_MARGIN_C = "slowdown_margin_c"
    """The margin at which they slow down; negative."""
    CLOCK_REASONS = "clock_reasons"
    """Bits: why the clocks are not at their highest."""
    SM_CLOCK_MHZ = "sm_clock_mhz"
    SM_CLOCK_MAX_MHZ = "sm_clock_max_mhz"
    POWER_W = "power_w"
    POWER_LIMIT_W = "power_limit_w"
    POWER_LIMIT_DEFAULT_W = "power_limit_default_w"
    PCIE_GENERATION = "pcie_generation"
    PCIE_GENERATION_MAX = "pcie_generation_max"
    PCIE_WIDTH = "pcie_width"
    PCIE_WIDTH_MAX = "pcie_width_max"
    PCIE_REPLAYS = "pcie_replays"
    ECC_CORRECTED = "ecc_corrected"
    ECC_UNCORRECTED = "ecc_uncorrected"
    SRAM_THRESHOLD = "sram_threshold"
    """1: the driver says that SRAM had more errors than it may."""
    REMAPPED_UNCORRECTED = "remapped_uncorrected"
    REMAP_PENDING = "remap_pending"
    REMAP_FAILED = "remap_failed"
    RETIRED_CORRECTED = "retired_corrected"
    RETIRED_UNCORRECTED = "retired_uncorrected"
    RETIRED_PENDING = "retired_pending"
    RECOVERY_ACTION = "recovery_action"
    NVLINKS = "nvlinks"
    """Bits: links that are active."""
    NVLINK_REPLAYS = "nvlink_replays"
    NVLINK_RECOVERIES = "nvlink_recoveries"
    NVLINK_CRC_ERRORS = "nvlink_crc_errors"
    MEMORY_USED_MIB = "memory_used_mib"
    FABRIC_STATE = "fabric_state"
    FABRIC_STATUS = "fabric_status"
    FABRIC_CLIQUE = "fabric_clique"
    FABRIC_HEALTH = "fabric_health"
    MIG = "mig"
    ECC_MODE = "ecc_mode"
    TENSOR_PERCENT = "tensor_percent"
    """Share of time with tensor cores at work, averaged over SMs, since the sample before."""
    SM_PERCENT = "sm_percent"
    DRAM_PERCENT = "dram_percent"


class Gpu(Value, frozen=True, kw_only=True):
    """One GPU at one moment: each signal is a value, an error code of NVML, or missing."""

    index: int
    pci: str = ""
    """As `xids.pci_address` writes it; empty if the driver never told."""
    uuid: str = ""
    serial: str = ""
    values: dict[Signal, float] = {}
    errors: dict[Signal, int] = {}
    pids: tuple[int, ...] = ()
    """Processes with a CUDA context on it."""

    @property
    def name(self) -> str:
        return gpu_item(self.pci or f"#{self.index}")

    def get(self, signal: Signal) -> float | None:
        """None: it has no such number, or one that is none."""
        value = self.values.get(signal)
        return value if value is not None and isfinite(value) else None

    def failed_with(self, code: Code) -> bool:
        return int(code) in self.errors.values()


class NvmlSample(Value, frozen=True, kw_only=True):
    """All GPUs of the machine at one moment."""

    driver: str = ""
    """Its version; empty if it does not answer."""
    error: int = 0
    """Why NVML as a whole does not answer; 0: it does."""
    gpus: tuple[Gpu, ...] = ()
    on_bus: tuple[str, ...] = ()
    """GPUs for computing that answer on the PCI bus, whatever NVML says."""
    silent: tuple[str, ...] = ()
    """GPUs that were on the PCI bus before, and are gone from it or answer with ones only."""

    @property
    def silent_as_a_whole(self) -> str:
        """Why nothing can be said of any GPU; empty: something can."""
        return f"NVML returned {self.error}" if self.error else ""

    @property
    def cause(self) -> str:
        """What machines may share if it is the driver's fault."""
        return f"driver {self.driver}" if self.driver else ""


class XidSample(Value, frozen=True, kw_only=True):
    """XIDs of the last day, as far as this source has run."""

    driver: str = ""
    starting_s: Seconds = 0.0
    """For how long NVML has been initialising; 0: it has. Cold GPUs take many seconds."""
    answers: dict[str, int] = {}
    """GPU, by its address -> NVML's code of a short question to it; 0: it answers."""
    events: tuple[XidEvent, ...] = ()
