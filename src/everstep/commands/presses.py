"""Counts Ctrl-C instead of being ended by it: who started processes must decide what it means.

SIGTERM counts as a Ctrl-C, since that is how schedulers say it. SIGHUP is left alone: a lost
terminal ends a viewer, and a viewer is all that it ends.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

from everstep.model import EverstepError

_COUNTED = (signal.SIGINT, signal.SIGTERM)


class Interrupted(EverstepError):
    """Ctrl-C before anything was changed."""

    exit_code = 130


@contextmanager
def hangup_unwinds() -> Iterator[None]:
    """A lost terminal ends this process as ever, but what it made on disk is removed first."""
    before = signal.getsignal(signal.SIGHUP)
    if before is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, lambda *_: sys.exit(128 + signal.SIGHUP))
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


class Presses:
    """How often Ctrl-C was pressed while this lasts."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._press) for number in _COUNTED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _press(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.count += 1
