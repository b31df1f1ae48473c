"""The checks of run.py, each in a process of its own: what holds on CUDA, with figures.

    python -m tests.gpu.checks NAME DEVICE ANSWER.json

A check returns a sentence and figures, raises CannotRun for what this machine lacks, and fails by
any other exception. DEVICE cpu is the rehearsal.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.gpu import fork_and_nccl, killed, saving
from tests.gpu.answers import Answer, CannotRun


def device(name: str) -> Answer:
    """What there is."""
    figures: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if name == "cpu":
        return Answer("rehearsal", figures)
    if not torch.cuda.is_available():
        raise AssertionError(f"the driver has a device, but torch {torch.__version__} uses none")
    properties = torch.cuda.get_device_properties(0)
    figures |= {"name": properties.name, "memory_gib": properties.total_memory / 2**30}
    figures["capability"] = f"{properties.major}.{properties.minor}"
    return Answer(f"{properties.name}, torch {torch.__version__}", figures)


def nvml(name: str) -> Answer:
    """Reads of an ordinary user through nvidia-ml-py."""
    try:
        pynvml: Any = importlib.import_module("pynvml")
    except ImportError:
        raise CannotRun("nvidia-ml-py is not installed") from None
    if name == "cpu":
        raise CannotRun("there is no device in a rehearsal")
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    reads: dict[str, Callable[[], Any]] = {
        "name": lambda: str(pynvml.nvmlDeviceGetName(handle)),
        "memory_used_bytes": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used,
        "temperature_c": lambda: pynvml.nvmlDeviceGetTemperature(handle, 0),
        "power_mw": lambda: pynvml.nvmlDeviceGetPowerUsage(handle),
        "ecc_uncorrected": lambda: pynvml.nvmlDeviceGetTotalEccErrors(handle, 1, 0),
        "throttle_reasons": lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        "remapped_rows": lambda: list(pynvml.nvmlDeviceGetRemappedRows(handle)),
        "processes": lambda: len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)),
    }
    figures: dict[str, Any] = {}
    for what, read in reads.items():
        try:
            figures[what] = read()
        except pynvml.NVMLError as error:
            figures[what] = f"not to be had: {error}"
    assert isinstance(figures["memory_used_bytes"], int), figures
    return Answer(f"{sum(not isinstance(f, str) for f in figures.values())} values read", figures)


CHECKS: dict[str, Callable[[str], Answer]] = {
    "device": device,
    "matrix": saving.matrix,
    "host_does_not_wait": saving.host_does_not_wait,
    "kills": killed.kills,
    "launcher_and_nccl": fork_and_nccl.launcher_and_nccl,
    "nvml": nvml,
}


def main(name: str, where: str, answer: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("it was told to end"))
    try:
        why, figures = CHECKS[name](where)
        outcome = "passed"
    except CannotRun as error:
        outcome, why, figures = "could not run", str(error), {}
    except BaseException as error:  # noqa: BLE001 -- the outermost of a check: the report shows it
        outcome, why = "failed", f"{type(error).__name__}: {error}".splitlines()[0]
        figures = {"traceback": traceback.format_exc().splitlines()}
    answer.write_text(json.dumps({"outcome": outcome, "why": why, "figures": figures}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
