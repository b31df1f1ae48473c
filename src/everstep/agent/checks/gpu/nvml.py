"""The source "nvml": one look at all GPUs of the machine, in a child process of its own.

NVML asks the driver, and a sick driver never answers: then the child is the finding. It stays
open between samples, since opening it wakes cold GPUs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everstep.agent.checks.check import Here, NotReadable, Source
from everstep.agent.checks.gpu.activity import Activity
from everstep.agent.checks.gpu.library import (
    Library,
    NvmlFailed,
    driver_version,
    hung,
    is_ours,
    why_absent,
)
from everstep.agent.checks.gpu.reading import Reading, identity, read_pids, read_signals
from everstep.agent.checks.gpu.samples import Code, Gpu, NvmlSample, Signal
from everstep.health import Result
from everstep.model import Seconds

HUNG_S: Seconds = 10.0
HUNG_TIMES = 2
"""Two samples of 5 s each. The source in events.py asks more often."""
NVIDIA, ALL_ONES = "0x10de", b"\xff\xff"
FOR_COMPUTING = "0x0302"
"""Beginning of the PCI class of GPUs without a display. One with a display proves nothing: the
machine may use it with another driver."""
DEVICES = "/sys/bus/pci/devices"


class NvmlSource(Source[NvmlSample]):
    """Samples of all GPUs."""

    name = "nvml"
    kind = NvmlSample
    every_s = 8.0  # with the way to the controller, known within ByteRobust's ten seconds (Table 3)
    blocks = True
    within_s = 5.0

    def __init__(self) -> None:
        self._library = Library()
        self._activity: Activity | None = None
        self._known: dict[int, Gpu] = {}
        self._computing: frozenset[str] | None = None
        self._on_bus: set[str] = set()
        self._version = ""

    def absent(self, here: Here) -> str:
        self._version = driver_version(here)
        return why_absent(here)

    def sample(self, here: Here) -> NvmlSample:
        driver = driver_version(here)
        try:
            starting_s = self._library.open()
            if starting_s:  # no sample: what comes first is what later ones are compared with
                raise NotReadable(f"the GPUs have been starting for {starting_s:.0f} s")
            return self._look(here, driver)
        except NvmlFailed as failed:
            self._library.forget()
            self._activity = None
            on_bus, silent = self._bus(here)
            return NvmlSample(driver=driver, error=failed.code, on_bus=on_bus, silent=silent)

    def unanswered(self, for_s: Seconds, times: int) -> Result | None:
        if times < HUNG_TIMES and for_s < HUNG_S:
            return None
        return hung("gpu.driver", self._version, for_s)

    def _look(self, here: Here, driver: str) -> NvmlSample:
        nvml = self._library.nvml
        try:
            driver = str(nvml.nvmlSystemGetDriverVersion())
            count = int(nvml.nvmlDeviceGetCount())
        except nvml.NVMLError as error:
            raise NvmlFailed(error.value) from error
        if self._activity is None:
            self._activity = Activity(nvml)
        every = (self._gpu(nvml, self._activity, index) for index in range(count))
        gpus = tuple(gpu for gpu in every if is_ours(gpu.pci, here))
        if any(gpu.failed_with(Code.UNINITIALIZED) for gpu in gpus):  # its driver was replaced
            raise NvmlFailed(Code.UNINITIALIZED)
        on_bus, silent = self._bus(here)
        return NvmlSample(driver=driver, gpus=gpus, on_bus=on_bus, silent=silent)

    def _gpu(self, nvml: Any, activity: Activity, index: int) -> Gpu:
        reading = Reading(nvml, index)
        known = self._known.get(index)
        handle = reading.ask(Signal.IDENTITY, lambda: nvml.nvmlDeviceGetHandleByIndex(index))
        if handle is None:
            return reading.gpu(known or Gpu(index=index))
        gpu = identity(reading, handle, known)
        self._known[index] = gpu
        read_signals(reading, handle)
        activity.read(reading, handle)
        return reading.gpu(gpu, read_pids(reading, handle))

    # --- the PCI bus ---

    def _bus(self, here: Here) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """GPUs that answer on the bus, and those that did and no longer do.

        The whole bus is looked through once: with hundreds of devices that takes milliseconds.
        """
        if self._computing is None:
            devices = here.path(DEVICES)
            found = devices.iterdir() if devices.is_dir() else ()
            self._computing = frozenset(each.name for each in found if _computes(each))
        known = {gpu.pci for gpu in self._known.values() if gpu.pci and is_ours(gpu.pci, here)}
        ours = {pci for pci in self._computing if is_ours(pci, here)}
        on_bus = {pci for pci in known | ours if _answers(here.path(f"{DEVICES}/{pci}"))}
        self._on_bus |= on_bus
        return tuple(sorted(on_bus)), tuple(sorted((known & self._on_bus) - on_bus))


def _computes(device: Path) -> bool:
    return _word(device / "vendor") == NVIDIA and _word(device / "class").startswith(FOR_COMPUTING)


def _word(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace").strip()
    except OSError:
        return ""


def _answers(device: Path) -> bool:
    """Whether the device is there and its registers do not read as ones, as after a lost link."""
    try:
        with (device / "config").open("rb") as config:
            return config.read(2) != ALL_ONES
    except FileNotFoundError:
        return False
    except OSError:  # no permission says nothing about the device
        return True
