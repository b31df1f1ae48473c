"""Reads one GPU by NVML: every signal that it and its driver have. Used by the source in nvml.py.

A call that an older driver lacks, or that this GPU does not support, is an error code under its
signal's name and nothing more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from functools import partial
from math import isfinite
from typing import Any

from everstep.agent.checks.gpu.samples import Code, Gpu, Signal
from everstep.agent.checks.xids import pci_address

RECOVERY_ACTION_FIELD = 230
FIELDS: dict[int, Signal] = {
    3: Signal.ECC_CORRECTED,
    4: Signal.ECC_UNCORRECTED,
    29: Signal.RETIRED_CORRECTED,
    30: Signal.RETIRED_UNCORRECTED,
    31: Signal.RETIRED_PENDING,
    52: Signal.NVLINK_REPLAYS,
    59: Signal.NVLINK_RECOVERIES,
    82: Signal.MEMORY_TEMPERATURE_C,
    94: Signal.PCIE_REPLAYS,
    143: Signal.REMAPPED_UNCORRECTED,
    144: Signal.REMAP_PENDING,
    145: Signal.REMAP_FAILED,
    194: Signal.SLOWDOWN_MARGIN_C,
    RECOVERY_ACTION_FIELD: Signal.RECOVERY_ACTION,
}
"""NVML's field ids (nvml.h, NVML_FI_DEV_*): one call for all of them."""
CRC_FIELDS = (38, 45)
"""CRC errors in flow control and in data, added up."""
LINK_COUNT_FIELD = 91
LINK_RECOVERIES_FIELD = 215
"""NVLink 5 counts the recoveries of each link, in place of the totals of its forerunners."""
LINKS_MOST = 36
NOT_AVAILABLE = frozenset({0xFFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFF})
"""What NVML writes for a number that it does not have."""
_VALUE_OF = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Member of the union, by valueType."""


class Reading:
    """Values and errors of one GPU, as they come in."""

    def __init__(self, nvml: Any, index: int) -> None:
        self.nvml = nvml
        self.index = index
        self.values: dict[Signal, float] = {}
        self.errors: dict[Signal, int] = {}

    def ask(self, signal: Signal, call: Callable[[], Any]) -> Any:
        """What the call answers, or None and its error noted. Garbage counts as missing."""
        try:
            return call()
        except self.nvml.NVMLError as error:
            self.errors[signal] = error.value
        except AttributeError:  # an older nvidia-ml-py
            self.errors[signal] = Code.FUNCTION_NOT_FOUND
        except ValueError:  # a text that is none
            pass
        return None

    def take(self, signal: Signal, call: Callable[[], Any], scale: float = 1.0) -> None:
        """Keep the number that the call answers; forget an error of an earlier attempt."""
        self.errors.pop(signal, None)
        value = self.ask(signal, call)
        if value is not None:
            self.keep(signal, float(value), scale)

    def keep(self, signal: Signal, value: float, scale: float = 1.0) -> None:
        """A number that NVML has given, unless it stands for none."""
        if value not in NOT_AVAILABLE and isfinite(value):
            self.values[signal] = value * scale

    def gpu(self, known: Gpu, pids: Iterable[int] = ()) -> Gpu:
        """The finished sample; `known` says who it is."""
        return Gpu(
            index=self.index,
            pci=known.pci,
            uuid=known.uuid,
            serial=known.serial,
            values=self.values,
            errors=self.errors,
            pids=tuple(sorted(pids)),
        )


def identity(reading: Reading, handle: Any, known: Gpu | None) -> Gpu:
    """Who the GPU is: what it says itself, else what was known of it."""
    nvml = reading.nvml
    bus = reading.ask(Signal.IDENTITY, lambda: nvml.nvmlDeviceGetPciInfo(handle).busId)
    uuid = reading.ask(Signal.IDENTITY, lambda: nvml.nvmlDeviceGetUUID(handle))
    before = dict(reading.errors)
    serial = reading.ask(Signal.IDENTITY, lambda: nvml.nvmlDeviceGetSerial(handle))
    if reading.errors.get(Signal.IDENTITY) == Code.NOT_SUPPORTED:  # consumer boards have none
        reading.errors = before
    known = known or Gpu(index=reading.index)
    return Gpu(
        index=reading.index,
        pci=pci_address(str(bus or "")) or known.pci,
        uuid=str(uuid or "") or known.uuid,
        serial=str(serial or "") or known.serial,
    )


def read_signals(reading: Reading, handle: Any) -> None:
    """Everything but activity of the cores, for which two samples are needed."""
    _read_fields(reading, handle)
    _read_state(reading, handle)
    _read_limits(reading, handle)
    _read_links(reading, handle)
    _read_structs(reading, handle)


def read_pids(reading: Reading, handle: Any) -> set[int]:
    """Processes that compute on it."""
    nvml = reading.nvml
    found = reading.ask(Signal.PROCESSES, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return {process.pid for process in found or ()}


def read_field(nvml: Any, handle: Any, field: int) -> int | None:
    """One field; None if this driver or GPU lacks it."""
    try:
        answer = nvml.nvmlDeviceGetFieldValues(handle, [field])[0]
    except nvml.NVMLError:
        return None
    value = _number(answer)
    return None if answer.nvmlReturn or not isfinite(value) else int(value)


def _number(answer: Any) -> float:
    kind = answer.valueType
    member = _VALUE_OF[kind] if kind < len(_VALUE_OF) else "ullVal"
    return float(getattr(answer.value, member))


def _read_fields(reading: Reading, handle: Any) -> None:
    asked = [*FIELDS, *CRC_FIELDS]
    answers = reading.ask(
        Signal.RECOVERY_ACTION, lambda: reading.nvml.nvmlDeviceGetFieldValues(handle, asked)
    )
    for field, answer in zip(asked, answers or (), strict=False):
        signal = FIELDS.get(field, Signal.NVLINK_CRC_ERRORS)
        if answer.nvmlReturn:
            reading.errors[signal] = answer.nvmlReturn
        else:
            reading.keep(signal, reading.values.get(signal, 0.0) + _number(answer))


def _read_state(reading: Reading, handle: Any) -> None:
    """What changes from second to second."""
    nvml = reading.nvml
    take = reading.take
    take(Signal.UTIL_PERCENT, lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    take(Signal.TEMPERATURE_C, lambda: nvml.nvmlDeviceGetTemperature(handle, 0))
    take(Signal.MARGIN_C, lambda: nvml.nvmlDeviceGetMarginTemperature(handle))
    take(Signal.SM_CLOCK_MHZ, lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
    take(Signal.POWER_W, lambda: nvml.nvmlDeviceGetPowerUsage(handle), 0.001)
    take(Signal.PCIE_GENERATION, lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle))
    take(Signal.PCIE_WIDTH, lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle))
    take(Signal.MEMORY_USED_MIB, lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used, 2.0**-20)
    take(Signal.CLOCK_REASONS, lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    if reading.errors.get(Signal.TEMPERATURE_C) == Code.FUNCTION_NOT_FOUND:  # its successor
        take(Signal.TEMPERATURE_C, lambda: nvml.nvmlDeviceGetTemperatureV(handle, 0))
    if reading.errors.get(Signal.CLOCK_REASONS) == Code.FUNCTION_NOT_FOUND:  # before R535
        take(Signal.CLOCK_REASONS, lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _read_limits(reading: Reading, handle: Any) -> None:
    """What should not change."""
    nvml = reading.nvml
    take = reading.take
    take(Signal.SHUTDOWN_AT_C, lambda: nvml.nvmlDeviceGetTemperatureThreshold(handle, 0))
    take(Signal.SLOWDOWN_AT_C, lambda: nvml.nvmlDeviceGetTemperatureThreshold(handle, 1))
    take(Signal.SM_CLOCK_MAX_MHZ, lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, 1))
    take(Signal.POWER_LIMIT_W, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle), 0.001)
    take(
        Signal.POWER_LIMIT_DEFAULT_W,
        lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle),
        0.001,
    )
    take(Signal.PCIE_GENERATION_MAX, lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
    take(Signal.PCIE_WIDTH_MAX, lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
    take(Signal.MIG, lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
    take(Signal.ECC_MODE, lambda: nvml.nvmlDeviceGetEccMode(handle)[0])


def _read_links(reading: Reading, handle: Any) -> None:
    """Which NVLinks are active, and the recoveries of those that count by link."""
    nvml = reading.nvml
    count = read_field(nvml, handle, LINK_COUNT_FIELD)
    if not count or count > LINKS_MOST:
        return
    active = 0
    for link in range(count):
        state = reading.ask(Signal.NVLINKS, partial(nvml.nvmlDeviceGetNvLinkState, handle, link))
        if state is None:
            return
        active |= bool(state) << link
    reading.values[Signal.NVLINKS] = float(active)
    if Signal.NVLINK_RECOVERIES in reading.values:
        return
    asked = [(LINK_RECOVERIES_FIELD, link) for link in range(count)]
    answers = reading.ask(
        Signal.NVLINK_RECOVERIES, lambda: nvml.nvmlDeviceGetFieldValues(handle, asked)
    )
    told = [_number(answer) for answer in answers or () if not answer.nvmlReturn]
    if told:
        reading.values[Signal.NVLINK_RECOVERIES] = sum(told)


def _read_structs(reading: Reading, handle: Any) -> None:
    """Answers that come in structs of newer drivers; the package may be too old for them."""
    nvml = reading.nvml
    if hasattr(nvml, "c_nvmlEccSramErrorStatus_v1_t"):
        status = nvml.c_nvmlEccSramErrorStatus_v1_t()
        reading.ask(
            Signal.SRAM_THRESHOLD,
            lambda: nvml.nvmlDeviceGetSramEccErrorStatus(handle, ctypes.byref(status)),
        )
        if Signal.SRAM_THRESHOLD not in reading.errors:
            reading.values[Signal.SRAM_THRESHOLD] = float(status.bThresholdExceeded)
    if hasattr(nvml, "c_nvmlGpuFabricInfo_v2_t"):
        fabric = nvml.c_nvmlGpuFabricInfo_v2_t()
        reading.ask(
            Signal.FABRIC_STATE,
            lambda: nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(fabric)),
        )
        if Signal.FABRIC_STATE not in reading.errors:
            reading.values[Signal.FABRIC_STATE] = float(fabric.state & 0xFF)  # a byte, and padding
            reading.values[Signal.FABRIC_STATUS] = float(fabric.status)
            reading.values[Signal.FABRIC_CLIQUE] = float(fabric.cliqueId)
            reading.values[Signal.FABRIC_HEALTH] = float(fabric.healthMask)
