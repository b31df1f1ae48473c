"""The controller's one clock: what the core is told the time is. The only place that reads it.

Wall time at start plus monotonic progress, never below the last journalled time: time in the
journal only grows, whatever an operator or NTP does to the wall clock, within a term and across.
"""

from __future__ import annotations

import time

from everstep.model import Seconds


class Clock:
    """Seconds since the epoch, as well as they were known when the controller started."""

    def __init__(self, *, not_before: Seconds = 0.0) -> None:
        """`not_before`: the last time in the journal, 0 for an empty one."""
        self._ahead = max(time.time(), not_before) - time.monotonic()

    def now(self) -> Seconds:
        return time.monotonic() + self._ahead
