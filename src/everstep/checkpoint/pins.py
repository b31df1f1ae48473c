"""Pins: the steps whose slots a rank must not overwrite, asked for by the agent of its machine.

Three words in SHM/rank-R/control, each with its own purpose, so that the disk tier and the backups
never release what the other one still needs. The agent writes them, the rank reads them whenever it
chooses a slot (slots.py). A word is stored at once: a kill leaves the old wish or the new one.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection
from pathlib import Path

from everstep.checkpoint.format import PAGE, load_word, store_word
from everstep.model import Rank, Step, Value
from everstep.paths import rank_shm

CONTROL_BYTES = PAGE
_PERSIST_AT = 0
_BACKUP_AT = 8
_SAFE_AT = 16


class Pins(Value, frozen=True, kw_only=True):
    """What is to be kept. A step may still have to be saved."""

    persist: Step | None = None
    """On its way to disk."""
    backup: Step | None = None
    """On its way to the peers, or there already."""
    safe: Step | None = None
    """The newest step that was known to be complete on all peers when `backup` was begun."""

    def in_force(self, held: Collection[Step], step: Step, most: int) -> list[Step]:
        """Which of them a save of `step` heeds: at most so many, the most precious first.

        A pin of a copy that is gone and will not be made again keeps nothing. There are more pins
        than slots for them only while a failed backup is tried again beside a disk copy; then that
        backup fails again, and the slots that rotate stay enough for a kill at any moment.
        """
        wanted = dict.fromkeys((self.safe, self.persist, self.backup))
        alive = [pin for pin in wanted if pin is not None and (pin in held or pin >= step)]
        return alive[:most]


def open_control(directory: Path) -> memoryview:
    """The control words of the rank whose slots lie there. OSError if there is no room."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(directory / "control", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, CONTROL_BYTES)
        return memoryview(mmap.mmap(fd, CONTROL_BYTES))
    finally:
        os.close(fd)


def read_pins(control: memoryview) -> Pins:
    return Pins(
        persist=_load(control, _PERSIST_AT),
        backup=_load(control, _BACKUP_AT),
        safe=_load(control, _SAFE_AT),
    )


def pins_of(shm: Path, rank: Rank) -> Pins:
    """What the rank is asked to keep."""
    return read_pins(open_control(rank_shm(shm, rank)))


def pin_for_disk(shm: Path, rank: Rank, step: Step | None) -> None:
    """Keep this step's slot for the disk tier from now on; None releases it.

    The rank looks whenever it chooses a slot, so a step that it is saving or will save is kept, and
    of an older one only disk.persist() can tell (ShardLost).
    """
    _store(open_control(rank_shm(shm, rank)), _PERSIST_AT, step)


def pin_for_backup(shm: Path, rank: Rank, backup: Step | None, safe: Step | None) -> None:
    """Keep these two steps' slots from now on, instead of those that were kept for backups before.

    `safe` goes first: where the former backup becomes the safe step, it is never without a pin.
    """
    control = open_control(rank_shm(shm, rank))
    _store(control, _SAFE_AT, safe)
    _store(control, _BACKUP_AT, backup)


def _load(control: memoryview, at: int) -> Step | None:
    word = load_word(control, at)
    return Step(word - 1) if word else None


def _store(control: memoryview, at: int, step: Step | None) -> None:
    store_word(control, at, 0 if step is None else step + 1)
