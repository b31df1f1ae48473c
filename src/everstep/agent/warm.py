"""Warms the launcher: torch imported and its first optimizer step done, on one thread, no CUDA.

Called once by agent/launcher.py. It must start no thread, must not initialise CUDA (a driver that
was initialised cannot be forked) and must import nothing of the user's. What it imports costs two
to three seconds of processor time that no restart pays again.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

MODULES = (
    "torch.distributed",
    "torch.nn.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.device_mesh",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.utils.data",
    "everstep.trainer.attach",
    "everstep.trainer.memory",
    "everstep.trainer.restore",
)
"""What data-parallel training scripts import, and what run.checkpoint() does. One that this torch
lacks is skipped."""
_SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1"}
"""numpy's OpenBLAS starts its threads when it is imported; nothing else imported here does."""


def warm_up(preload: Iterable[str]) -> list[str]:
    """Import and exercise; returns what was skipped, one clause each (for the launcher's log)."""
    restore = {name: os.environ.get(name) for name in _SINGLE_THREADED}
    os.environ.update(_SINGLE_THREADED)
    try:
        with warnings.catch_warnings():
            # A warning shown (once) here would be missing from the ranks' own output.
            warnings.simplefilter("ignore")
            skipped = _import_all(preload)
    finally:
        for name, value in restore.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    gc.collect()
    gc.freeze()
    return skipped


def why_not_to_fork() -> str | None:
    """The reason why forking this process would break its children, or None."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        names = ", ".join(thread.name for thread in threading.enumerate()[1:]) or "native ones"
        return (
            f"the launcher has {threads} threads ({names}), so it cannot be forked: leave out the"
            " --preload package that starts them, or use --no-fork"
        )
    torch = sys.modules.get("torch")
    files = open_files_below("/dev/nvidia")
    if files or (torch is not None and torch.cuda.is_initialized()):
        opened = f" ({', '.join(files)} open)" if files else ""
        return (
            f"the launcher uses a GPU{opened}, so it cannot be forked: leave out the --preload"
            " package that does it, or use --no-fork"
        )
    return None


def open_files_below(prefix: str) -> list[str]:
    """Paths with this prefix that this process has open."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue  # the descriptor of the listing itself
        if target.startswith(prefix):
            found.append(target)
    return sorted(found)


def _import_all(preload: Iterable[str]) -> list[str]:
    skipped: list[str] = []
    torch = _import("torch", skipped)
    if torch is None:
        return [*skipped, *(name for name in preload if _import(name, skipped) is None)]
    if torch is not None:
        is_available = torch.cuda.is_available
        # The original, which the optimizer's health check calls too, would ask the driver, and a
        # driver that was asked cannot be forked.
        torch.cuda.is_available = _no_cuda
        try:
            for name in (*MODULES, *preload):
                _import(name, skipped)
            _first_optimizer_step(torch)
        finally:
            torch.cuda.is_available = is_available
    return skipped


def _import(name: str, skipped: list[str]) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        skipped.append(f"{name} ({error})")
        return None


def _no_cuda() -> bool:
    return False


def _first_optimizer_step(torch: ModuleType) -> None:
    """The first one of a process imports torch._dynamo and more, for half a second.

    The gradient is set by hand: a backward pass would start autograd's threads and count GPUs.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        parameter = torch.nn.Parameter(torch.zeros(4, 4))
        parameter.grad = torch.ones(4, 4)
        torch.optim.AdamW([parameter]).step()
    finally:
        torch.set_num_threads(threads)
