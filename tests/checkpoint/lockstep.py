"""Forked writers that save in lockstep as training does, to be killed at any moment."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

from tests.checkpoint.plain import save, writer

_STEP = struct.Struct("=q")


class Counters:
    """The newest step that each rank finished, in memory that outlives them."""

    def __init__(self, ranks: int, start: int) -> None:
        self._map = mmap.mmap(-1, ranks * _STEP.size)
        self._words = memoryview(self._map).cast("q")
        for rank in range(ranks):
            self._words[rank] = start

    def finish(self, rank: int, step: int) -> None:
        self._words[rank] = step

    def all(self) -> list[int]:
        return list(self._words)


def fork(work: Callable[[], None]) -> int:
    """Run `work` in a child until it returns or is killed; its pid."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any thread
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001 -- nothing may get out into the test's own stack
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def kill(pid: int) -> None:
    """SIGKILL, and wait until the process is gone. It must not have ended before."""
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"the writer ended by itself: {status}"


def train(shm: Path, rank: int, generation: int, counters: Counters) -> None:
    """Finish a step once all have finished the one before, then save it; for ever."""
    shards = writer(shm, rank, generation)
    shards.reserve(1 << 20)
    while True:
        step = counters.all()[rank] + 1
        while min(counters.all()) < step - 1:
            time.sleep(20e-6)
        counters.finish(rank, step)
        save(shards, rank, step, generation)
