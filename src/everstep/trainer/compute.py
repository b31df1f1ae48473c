"""How long a rank computes in a step: the time in which it did not wait for others.

In a step of synchronous training all ranks take equally long, for the fast ones wait for the slow.
What differs is how long each one works, and that names the slow one (core/straggling.py).

On a CPU it is the time that the thread of the training loop was on a processor, or ready to be on
one and not let: of a rank that is throttled by a quota, or starved by others, the second grows. A
rank that waits for others in gloo sleeps, and so does one that waits for a disk or for its data
loader's workers: those waits are not in it. Nor is time in which a signal had stopped it.

On CUDA the CPU spins while it waits for the device, so processor time says nothing of the device.
There it is the time by the clock without what lies inside `with run.communicating():` blocks. It is
unknown (NaN) if the script has none, and worth something only if a block lasts until the data have
arrived. The same is done where the kernel does not account for its threads (no
CONFIG_SCHED_INFO, some sandboxes).

What lies in communicating(), evaluating(), saving() and compiling() blocks of the loop's thread
never counts.

Measured with this code on a busy virtual machine with 2 cores (Firecracker, Linux 6.18, Python
3.11, processor time, best of 15 times 2,000): one read of schedstat 1.3 us; all that a step costs
here and in phases.py 4.2 us; a communicating() block in the loop's thread 7.6 us.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import NamedTuple

NAN = float("nan")
_NS = 1e-9
_LINE = 80
"""Bytes: three numbers of 20 digits at most, with blanks."""


class _Moment(NamedTuple):
    """A time by both measures."""

    clock_ns: int
    worked_ns: int


class Compute:
    """Measures the steps of one thread: that of the training loop, which ends steps."""

    def __init__(self) -> None:
        self._fd = -1
        self._thread = 0
        self._cuda = False
        self._known = False
        """Whether a step has begun, so that all of it is measured."""
        self._began = _Moment(0, 0)
        self._depth = 0
        self._left = _Moment(0, 0)
        """When the outermost block began, or the step within it."""
        self._communicates = False
        """Whether that block is communication."""
        self._aside_ns = 0
        """Of this step's measure, what lies in blocks."""
        self._phases_ns = 0
        """Of this step by the clock, what lies in blocks that are no communication."""
        self._communicated = False

    def finish_step(self, now_ns: int) -> tuple[float, float]:
        """Seconds of work and by the clock since the step before, NaN if unknown; the next begins.

        `now_ns` is CLOCK_MONOTONIC.
        """
        cuda = self._cuda or _uses_cuda()
        if self._thread != threading.get_ident() or cuda != self._cuda:
            self._begin_thread(cuda=cuda)
        now = self._moment(now_ns)
        if self._depth:
            self._set_aside(now)
        compute_s = wall_s = NAN
        if self._known:
            wall_s = (now.clock_ns - self._began.clock_ns - self._phases_ns) * _NS
        if self._known and (self._fd >= 0 or self._communicated):
            worked_ns = now.worked_ns - self._began.worked_ns - self._aside_ns
            compute_s = max(0.0, worked_ns * _NS)
        self._began, self._known = now, True
        self._aside_ns = self._phases_ns = 0
        self._communicated = False
        return compute_s, wall_s

    def leave(self, *, communicates: bool) -> None:
        """A block begins. Of other threads nothing is taken: they are not measured."""
        if threading.get_ident() != self._thread:
            return
        self._depth += 1
        if self._depth == 1:
            self._communicates = communicates
            self._left = self._moment(time.monotonic_ns())

    def come_back(self) -> None:
        """A block ends."""
        if threading.get_ident() != self._thread or self._depth == 0:
            return
        self._depth -= 1
        if self._depth == 0:
            self._set_aside(self._moment(time.monotonic_ns()))

    def _set_aside(self, now: _Moment) -> None:
        self._aside_ns += now.worked_ns - self._left.worked_ns
        if self._communicates:
            self._communicated = True
        else:
            self._phases_ns += now.clock_ns - self._left.clock_ns
        self._left = now

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._thread, self._known = -1, 0, False

    def _begin_thread(self, *, cuda: bool) -> None:
        self.close()
        self._thread, self._cuda, self._depth = threading.get_ident(), cuda, 0
        if cuda:
            return
        path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if not _is_kept(self._fd):
                os.close(self._fd)
                self._fd = -1

    def _moment(self, now_ns: int) -> _Moment:
        return _Moment(now_ns, now_ns if self._fd < 0 else _work_of(self._fd))


def _work_of(fd: int) -> int:
    """Nanoseconds on a processor, and ready for one (Documentation/scheduler/sched-stats.rst)."""
    ran, waited, _ = os.pread(fd, _LINE, 0).split()
    return int(ran) + int(waited)


def _is_kept(fd: int) -> bool:
    """Whether the kernel writes it at all. A thread that has just begun has time slices only."""
    return any(int(number) for number in os.pread(fd, _LINE, 0).split())


def _uses_cuda() -> bool:
    """Without importing torch."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())
