"""One rank's checkpoint slots in shared memory, as checkpoint/slots.py has them, without the bytes.

Four slots: three rotate, and one may be pinned until it is on disk. A save overwrites a torn slot
if there is one, else the oldest that is not pinned, and commits last. What a rank will do is known
in advance (training.py plans whole steps), so operations wait here until their time comes.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from everstep.model import Copy, Generation, Rank, Seconds, Step

ROTATING = 3


class _Operation(NamedTuple):
    at: Seconds
    commits: bool
    """False: the save begins."""
    step: Step


class RankMemory:
    """The slots of one rank on one machine. They outlive the rank's processes."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._slots: list[tuple[Step, Generation] | None] = []
        """None: torn."""
        self.free_at: Seconds = 0.0
        """When the newest planned save is committed: the next update waits for it."""
        self._generation = Generation(0)
        self._writing: int | None = None
        self._pin: Step | None = None
        self._planned: deque[_Operation] = deque()

    def plan_save(self, step: Step, generation: Generation, begins: Seconds, ends: Seconds) -> None:
        """The rank will save this step; plans come in order of time."""
        self._generation = generation
        self.free_at = ends
        self._planned.append(_Operation(begins, False, step))
        self._planned.append(_Operation(ends, True, step))

    def settle(self, now: Seconds) -> None:
        """Let everything happen that is due."""
        while self._planned and self._planned[0].at <= now:
            operation = self._planned.popleft()
            if not operation.commits:
                self._writing = self._overwrite()
            elif self._writing is not None:
                self._slots[self._writing] = (operation.step, self._generation)
                self._writing = None

    def cut(self, now: Seconds) -> None:
        """The rank died: what it was about to do does not happen."""
        self.settle(now)
        self._planned.clear()
        self._writing = None
        self.free_at = now

    def copies(self) -> list[Copy]:
        """Committed slots, oldest first. Settle first."""
        held = sorted(slot for slot in self._slots if slot is not None)
        return [Copy(rank=self.rank, step=step, generation=gen) for step, gen in held]

    def drop_newer(self, step: Step) -> None:
        """What the next generation does not restore is void."""
        self._slots = [None if slot and slot[0] > step else slot for slot in self._slots]

    def pin(self, step: Step | None) -> None:
        """Do not overwrite this step once it is saved."""
        self._pin = step

    def _overwrite(self) -> int:
        free = [n for n, slot in enumerate(self._slots) if slot is None or slot[0] != self._pin]
        if len(free) < ROTATING:
            self._slots.append(None)
            return len(self._slots) - 1
        chosen = min(free, key=lambda n: self._slots[n] or (Step(-1), Generation(0)))
        self._slots[chosen] = None
        return chosen
