"""Opening NVML without hanging: whether it is here, and its first call, which may take long.

The two GPU sources use it; only their child processes load the library.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import threading
import time
from functools import cache
from importlib.util import find_spec
from typing import Any

from everstep.agent.checks.check import Here, NotReadable
from everstep.agent.checks.gpu.samples import Code
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result
from everstep.model import Seconds

LIBRARY = "libnvidia-ml.so.1"
PATIENCE_S: Seconds = 2.5
"""Waiting for the start within one sample; below the time that a source gives one. Eight cold GPUs
without persistence mode take 10 to 30 s, and no driver hangs: so the start is no silence."""
_VERSION = re.compile(r"Kernel Module\s+(?:for \S+\s+)?(\d+\.[\d.]*\d)")


class NvmlFailed(Exception):
    """NVML as a whole does not work; `code` is NVML's."""

    def __init__(self, code: int) -> None:
        super().__init__(f"NVML returned {code}")
        self.code = code


def why_absent(here: Here) -> str:
    """Why there is no NVML on this machine; empty if there is. Does not call it."""
    driver = [here.path("/proc/driver/nvidia"), here.path("/dev/nvidiactl")]
    if not any(path.exists() for path in driver) and not _loadable():
        return f"no NVIDIA driver: neither /dev/nvidiactl nor {LIBRARY}"
    if find_spec("pynvml") is None:
        return "the package nvidia-ml-py is not installed"
    return ""


@cache
def _loadable() -> bool:
    """Whether the library is on the loader's path; where it is, loading it asks no driver."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def driver_version(here: Here) -> str:
    """As the kernel's module says it, which answers even when the GPUs do not; or empty."""
    try:
        text = here.path("/proc/driver/nvidia/version").read_text("utf-8", "replace")
    except OSError:
        return ""
    found = _VERSION.search(text)
    return found[1] if found else ""


def is_ours(pci: str, here: Here) -> bool:
    """Whether the job uses this GPU, as far as that is known: others' may break."""
    return not here.gpus or pci in here.gpus or not pci or pci.startswith("#")


def hung(check: str, version: str, for_s: Seconds) -> Result:
    """What it means that NVML does not come back."""
    return Result(
        check=check,
        verdict=Verdict.EVICT,
        category=Category.GPU_UNAVAILABLE,
        why=f"the GPU driver has not answered for {for_s:.0f} s",
        do="Reboot the machine: a process inside the driver cannot be ended.",
        cause=f"driver {version}" if version else "",
        values={"unanswered_s": for_s},
    )


class Library:
    """NVML, opened when first needed and again after it failed."""

    def __init__(self) -> None:
        self._opened = False
        self._start: threading.Thread | None = None
        self._began = 0.0
        self._failure: int | None = None

    @property
    def nvml(self) -> Any:
        """The module of nvidia-ml-py, which brings no annotations."""
        return importlib.import_module("pynvml")

    def open(self) -> Seconds:
        """0 if it is open, else for how long it has been starting. NvmlFailed, NotReadable."""
        if self._opened:
            return 0.0
        if self._start is None:
            self._failure = None
            self._began = time.monotonic()
            self._start = threading.Thread(target=self._initialise, daemon=True)
            self._start.start()
        self._start.join(PATIENCE_S)
        if self._start.is_alive():
            return max(time.monotonic() - self._began, 0.001)
        self._start = None
        if self._failure == Code.LIBRARY_NOT_FOUND:
            raise NotReadable(f"{LIBRARY} is not on the loader's path")
        if self._failure is not None:
            raise NvmlFailed(self._failure)
        self._opened = True
        return 0.0

    def forget(self) -> None:
        """Open it anew next time. Without closing: what failed may hang."""
        self._opened = False

    def _initialise(self) -> None:
        nvml = self.nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            self._failure = error.value
