"""What it means that a rank does something else than wait while others wait for it.

For aggregate.py. A process that is stopped, or sleeps in the kernel, is its machine's matter
whatever its stack says. One that waits for a lock, or for a worker that waits itself, is the
program's. Some only take long.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum

from everstep.core.outlying import Seen, doing_of
from everstep.diagnosis.activity import HIDES, WAITS, Activity, Doing, activity_of
from everstep.looks import Child, Fingerprint, Role, Shown, Stack

STOPS = "TtD"
"""States of the kernel in which a process does nothing: stopped, traced, asleep there."""
HALTS = "Tt"
"""Those that no process is in by its own work."""
_SOFTWARE = frozenset(
    {
        Activity.LOCK,
        Activity.GIL,
        Activity.DEBUGGER,
        Activity.SLEEP,
        Activity.EXIT,
        Activity.COLLECT,
    }
)
_UNSURE = HIDES | {Activity.REMOTE, Activity.UNSEEN}
"""Who is in these may wait below Python, perhaps for the others, or for a service elsewhere."""
_BUSY = frozenset({Activity.EVALUATE, Activity.SAVE, Activity.LOAD, Activity.COMPILE})
_READS = frozenset({Activity.STORAGE, Activity.DEVICE, Activity.IMPORT})
_PIPES = re.compile(r"(anon_)?pipe_(read|write|wait\w*)|fifo_open|wait_for_partner|pipe_wait")
"""Functions of the kernel in which a process waits for the other end of a pipe."""
_MAY_READ = _READS | _BUSY | {Activity.CODE, Activity.LOADER, Activity.UNSEEN}
"""What a process may be in while a read hangs; others wait in a pipe for a process they started."""


class Nature(StrEnum):
    """What holds a rank up."""

    STUCK = "stuck"
    """A read, a driver, or work of its own."""
    SOFTWARE = "software"
    BUSY = "busy"
    """It works, and takes long."""
    UNSURE = "unsure"
    """It may wait for others."""


def stopped(seen: Seen, letters: str = STOPS) -> str:
    """Why a rank's process cannot go on by the kernel: "is stopped (state T)"; or empty."""
    if clause := _stopped(seen.cluster.posture.rank, letters):
        return clause
    if seen.doing.activity in WAITS:
        return ""
    return child_stopped(seen, letters)


def child_stopped(seen: Seen, letters: str = STOPS) -> str:
    """The same of its children."""
    for child in seen.cluster.posture.children:
        if clause := _stopped(child.shown, letters):
            return f"has {_NAMES[child.role]} that {clause}"
    return ""


_NAMES = {
    Role.RANK: "a process",
    Role.LOADER: "a worker of its loader",
    Role.SAVER: "a writer of checkpoints",
    Role.COMPILER: "a compiler",
    Role.CHILD: "a child process",
}


def _stopped(shown: Shown, letters: str) -> str:
    letter = shown.state[:1]
    if not letter or letter not in letters:
        return ""
    if letter == "D":
        where = f" in {shown.wchan}" if shown.wchan else ""
        return f"is asleep in the kernel (state D{where})"
    return f"is stopped (state {letter})"


def child_stuck(seen: Seen, stacks: Mapping[Fingerprint, Stack]) -> str:
    """A child of a rank that does not wait for others and that hangs in a read: who and where."""
    if seen.doing.activity in WAITS:
        return ""
    for child in seen.cluster.posture.children:
        done = doing_of(child.shown, stacks)
        if child.role in {Role.LOADER, Role.SAVER} and in_read(done, child.shown):
            return f"{_NAMES[child.role]} hangs in {child.shown.wchan} ({done.at or done.call})"
    return ""


def in_read(done: Doing, shown: Shown) -> bool:
    """Whether a process waits in the kernel for a file, a pipe or a driver."""
    if done.activity not in _MAY_READ:
        return False
    if done.part is Activity.LOCK and done.activity is Activity.LOADER:
        return False  # an idle worker waits for its next order, in a pipe
    return in_pipe(done, shown) or (
        activity_of(shown.wchan, "", near=True) in _READS if shown.wchan else False
    )


def in_pipe(done: Doing, shown: Shown) -> bool:
    """Whether it waits for the other end of a pipe: nobody may ever be there."""
    return done.activity in _MAY_READ and bool(_PIPES.fullmatch(shown.wchan))


def nature(seen: Seen, stacks: Mapping[Fingerprint, Stack]) -> Nature:
    """What holds these ranks up, as far as one look tells."""
    shown, done = seen.cluster.posture.rank, seen.doing
    if in_read(done, shown) or child_stuck(seen, stacks):
        return Nature.STUCK
    if done.activity in _SOFTWARE:
        return Nature.SOFTWARE
    if done.activity is Activity.LOADER:
        return _of_loader(seen, stacks)
    if done.activity in _BUSY:
        return _of_busy(seen)
    if done.activity in _UNSURE:
        return Nature.UNSURE
    return Nature.STUCK


def _of_loader(seen: Seen, stacks: Mapping[Fingerprint, Stack]) -> Nature:
    """A loader whose workers all wait for orders, or for a lock, waits for itself."""
    workers = [c for c in seen.cluster.posture.children if c.role is Role.LOADER]
    if workers:
        software = all(_idle(worker, stacks) for worker in workers)
        return Nature.SOFTWARE if software else Nature.STUCK
    return Nature.SOFTWARE if seen.doing.part in _SOFTWARE else Nature.STUCK


def _idle(worker: Child, stacks: Mapping[Fingerprint, Stack]) -> bool:
    done = doing_of(worker.shown, stacks)
    return done.activity in _SOFTWARE or (
        done.activity is Activity.LOADER and done.part in _SOFTWARE
    )


def _of_busy(seen: Seen) -> Nature:
    """Evaluation and the like: what part of it waits decides, if any does."""
    posture = seen.cluster.posture
    runs = [shown.state[:1] for shown in (posture.rank, *(c.shown for c in posture.children))]
    if "R" in runs or seen.doing.part not in _SOFTWARE | _READS:
        return Nature.BUSY
    return Nature.SOFTWARE if seen.doing.part in _SOFTWARE else Nature.STUCK
