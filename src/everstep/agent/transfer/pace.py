"""How fast backups may leave a machine: a token bucket over all of its transfers.

The clock is the caller's. Debts are allowed: whoever takes more than is there waits for as long as
the bucket needs to be at zero again, so a piece of any size passes and the mean rate is kept.
"""

from __future__ import annotations

import threading

from everstep.model import Seconds

BURST_S: Seconds = 0.1
"""What was not used in the last tenth of a second may be made up for."""


class TokenBucket:
    """Any thread may take from it."""

    def __init__(self, bytes_per_s: float) -> None:
        """0: no limit."""
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._tokens = 0.0
        self._at: Seconds | None = None

    def take(self, count: int, now: Seconds) -> Seconds:
        """Take so many bytes; how long to wait before they are sent."""
        if self._bytes_per_s <= 0:
            return 0.0
        with self._lock:
            passed = 0.0 if self._at is None else max(0.0, now - self._at)
            self._at = now
            burst = self._bytes_per_s * BURST_S
            self._tokens = min(burst, self._tokens + passed * self._bytes_per_s) - count
            return max(0.0, -self._tokens / self._bytes_per_s)
