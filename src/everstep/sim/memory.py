"""Checkpoint slots in shared memory, as checkpoint/slots.py and kept.py have them, without bytes.

Three slots of a rank rotate, beside them lies what is pinned: for the disk, for a backup. A save
overwrites a torn slot if there is one, else the oldest that is not pinned, and commits last. What a
rank will do is known in advance (training.py plans whole steps), so operations wait here until
their time comes.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from msgspec.structs import replace

from everstep.checkpoint.kept import choose_kept
from everstep.checkpoint.need import RECEIVED, ROTATING
from everstep.checkpoint.pins import Pins
from everstep.checkpoint.slots import Held
from everstep.model import NO_STEP, Copy, Generation, Rank, Seconds, Step

PINNED = 2
"""Slots for pins, with backups. Without them only one step is ever pinned."""


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
        self._pins = Pins()
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
                self._writing = self._overwrite(operation.step)
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

    def keep_only(self, step: Step) -> None:
        """The rank does not run here any more."""
        self._slots = [slot for slot in self._slots if slot and slot[0] == step]

    def pin(self, step: Step | None) -> None:
        """Do not overwrite this step once it is saved: it is to go to disk."""
        self._pins = Pins(persist=step, backup=self._pins.backup, safe=self._pins.safe)

    def pin_for_backup(self, backup: Step | None, safe: Step | None) -> None:
        """Nor these."""
        self._pins = Pins(persist=self._pins.persist, backup=backup, safe=safe)

    def keep_restored(self, step: Step) -> None:
        """As agent/backing_up.py does before ranks start."""
        held = {copy.step for copy in self.copies()}
        safe = self._pins.safe if self._pins.safe in held else step
        backup = self._pins.backup if self._pins.backup in held else step if step in held else None
        self.pin_for_backup(backup, safe if safe != NO_STEP else None)

    def put(self, step: Step, generation: Generation) -> None:
        """A shard was fetched from a peer."""
        self._slots[self._overwrite(step)] = (step, generation)

    def _overwrite(self, step: Step) -> int:
        pinned = self._pins.in_force([slot[0] for slot in self._slots if slot], step, PINNED)
        free = [n for n, slot in enumerate(self._slots) if slot is None or slot[0] not in pinned]
        if len(free) < ROTATING:
            self._slots.append(None)
            return len(self._slots) - 1
        chosen = min(free, key=lambda n: self._slots[n] or (Step(-1), Generation(0)))
        self._slots[chosen] = None
        return chosen


class KeptMemory:
    """What one machine keeps for ranks of others."""

    def __init__(self) -> None:
        self._slots: dict[Rank, list[Copy | None]] = {}

    def begin(self, copy: Copy, safe: Step) -> int:
        """Void the slot that a backup will overwrite, unless it is there already: its number."""
        slots = self._slots.setdefault(copy.rank, [None] * RECEIVED)
        if copy in slots:
            return slots.index(copy)
        held = [
            None if found is None else Held(step=found.step, generation=found.generation)
            for found in slots
        ]
        index = choose_kept(held, copy.step, safe)
        assert index is not None, "nobody reads backups while others are sent"
        slots[index] = None
        return index

    def commit(self, index: int, copy: Copy) -> None:
        self._slots[copy.rank][index] = copy

    def find(self, wanted: Copy) -> Copy | None:
        """The backup of this rank, step and generation, whole or a part."""
        kept = self._slots.get(wanted.rank, ())
        return next((copy for copy in kept if copy and replace(copy, replicas=()) == wanted), None)

    def copies(self) -> tuple[Copy, ...]:
        return tuple(
            copy for rank in sorted(self._slots) for copy in self._slots[rank] if copy is not None
        )

    def keep_only(self, step: Step) -> None:
        """The job has another size from now on."""
        for slots in self._slots.values():
            slots[:] = [copy if copy and copy.step == step else None for copy in slots]

    def drop_newer(self, step: Step) -> None:
        """What the next generation does not restore is void."""
        for slots in self._slots.values():
            slots[:] = [copy if copy and copy.step <= step else None for copy in slots]
