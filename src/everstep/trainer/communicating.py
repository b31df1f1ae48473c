"""Says for how long this rank has been communicating: for backups that yield, for hang analysis.

run.py hands one out for the whole process. The word in the slot is written when the outermost block
begins and when it ends, whichever threads they are of. What lies in blocks is no work of this rank:
of each one phases.py hears too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

_Do = Callable[[], None]


class Communicating:
    """A context manager that may be entered again and again."""

    def __init__(self, mark: Callable[[int], None], begin: _Do, end: _Do) -> None:
        """`mark` takes the time by CLOCK_MONOTONIC in nanoseconds, and 0 at the end. `begin` and
        `end` are called on each thread, for every block.
        """
        self._mark = mark
        self._begin = begin
        self._end = end
        self._lock = threading.Lock()
        self._depth = 0

    def __enter__(self) -> None:
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._mark(time.monotonic_ns())
        self._begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._mark(0)
