"""The virtual clock: what is to happen, in order of time. All of the simulator waits here."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from everstep.model import Seconds

Call = Callable[[], None]


class Schedule:
    """Calls in order of time; calls of the same time in the order in which they were planned."""

    def __init__(self, now: Seconds) -> None:
        self.now = now
        self.done = 0
        """Calls made so far."""
        self._planned: list[tuple[Seconds, int, Call]] = []
        self._count = 0

    def at(self, time: Seconds, call: Call) -> None:
        """Plan a call, at once if its time is past."""
        self._count += 1
        heapq.heappush(self._planned, (max(time, self.now), self._count, call))

    def after(self, delay_s: Seconds, call: Call) -> None:
        """Plan a call `delay_s` from now."""
        self.at(self.now + delay_s, call)

    def run(self, until: Callable[[], bool], deadline: Seconds) -> bool:
        """Make calls until this holds; False if `deadline` comes first, or nothing is planned."""
        while not until():
            if not self._planned or self._planned[0][0] > deadline:
                return False
            self.now, _, call = heapq.heappop(self._planned)
            self.done += 1
            call()
        return True
