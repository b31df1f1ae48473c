"""How fast backups may leave a machine: a token bucket over all of its transfers, with manners.

The clock is the caller's. Debts are allowed: whoever takes more than is there waits for as long as
the bucket needs to be at zero again, so a piece of any size passes and the mean rate is kept. And
while ranks of this machine say that they communicate, a piece waits for them, though not for ever:
training that communicates all the time must not end backups.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from everstep.model import Seconds

BURST_S: Seconds = 0.1
"""What was not used in the last tenth of a second may be made up for."""
LEAST_BYTES_PER_S = 4 << 20
"""Spread over its time, a backup is not sent slower than this: training does not notice so little,
and peers take a connection that moves nothing for seconds to be dead."""
LOOK_EVERY_S: Seconds = 0.001
"""Between looks at ranks that communicate. A collective of a large model takes milliseconds."""


def rate_for(total_bytes: int, spread_s: Seconds, most: float) -> float:
    """Bytes per second that bring so many bytes over in that time; `most` if that is less.

    0 is no limit: for `spread_s` and `most`, and in what is returned.
    """
    if spread_s <= 0:
        return most
    rate = max(total_bytes / spread_s, LEAST_BYTES_PER_S)
    return min(rate, most) if most > 0 else rate


class TokenBucket:
    """Of one backup, for all its transfers: any thread may take from it."""

    def __init__(
        self,
        bytes_per_s: float,
        busy: Callable[[], bool] = lambda: False,
        yields_s: Seconds = 0.0,
    ) -> None:
        """0: no limit. While `busy`, pieces wait, `yields_s` in all; then they do not any more."""
        self._bytes_per_s = bytes_per_s
        self._busy = busy
        self._yields_s = yields_s
        self._lock = threading.Lock()
        self._tokens = 0.0
        self._at: Seconds | None = None
        self._yielded_at: Seconds = 0.0

    @property
    def paces(self) -> bool:
        """Whether it ever makes anybody wait."""
        return self._bytes_per_s > 0 or self._yields_s > 0

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

    def hold(self, now: Seconds) -> Seconds:
        """How long to wait before asking again; 0: send.

        What several transfers wait at the same time counts once.
        """
        if self._yields_s <= 0 or not self._busy():
            return 0.0
        with self._lock:
            self._yields_s -= min(max(0.0, now - self._yielded_at), LOOK_EVERY_S)
            self._yielded_at = now
        return LOOK_EVERY_S
