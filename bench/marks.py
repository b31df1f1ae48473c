"""Marks: what each rank of a script under measurement writes down, for launched.py to read.

Used by restart_script.py and checkpoint_script.py, in the ranks.
"""

from __future__ import annotations

import os
import time


class Marks:
    """Lines "RESTART PID EVENT STEP NANOSECONDS" in a file of this rank, one write each."""

    def __init__(self, directory: str) -> None:
        path = f"{directory}/rank-{os.environ['RANK']}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._who = f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {os.getpid()}"

    def write(self, event: str, step: int = -1, at_ns: int | None = None) -> None:
        """`at_ns`: by the monotonic clock that all processes of a host share; None is now."""
        at_ns = time.monotonic_ns() if at_ns is None else at_ns
        os.write(self._file, f"{self._who} {event} {step} {at_ns}\n".encode())
