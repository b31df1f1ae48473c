"""Whether what ranks do may last long and yet be over by itself, although nothing moves in it.

For aggregate.py. A stack of a rank that writes a large file looks the same for a minute, and so
does one that waits for a slow storage. Who is stopped, or in a deadlock, never goes on; verdicts.py
gives all others more time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum

from everstep.core.holding import HALTS, Nature, child_stopped, in_pipe, nature
from everstep.core.outlying import Seen, only
from everstep.diagnosis.activity import Activity
from everstep.looks import Fingerprint, Ranges, Role, Stack, ranks_in


class Lasts(IntEnum):
    """How long something may take that is well."""

    NO_TIME = 0
    """Waits for other ranks, locks, drivers, whatever is stopped: it does not end by itself."""
    A_MINUTE = 1
    """Computing, reading, sleeping, a slow data loader."""
    LONG = 2
    """As a checkpoint, an evaluation, a compiler."""


_LONG = frozenset(
    {
        Activity.SAVE,
        Activity.LOAD,
        Activity.EVALUATE,
        Activity.COMPILE,
        Activity.REMOTE,
        Activity.CHILD,
        Activity.IMPORT,
    }
)
_A_MINUTE = frozenset(
    {Activity.CODE, Activity.STORAGE, Activity.LOADER, Activity.SLEEP, Activity.COLLECT}
)


def lasts(seen: Iterable[Seen], stacks: Mapping[Fingerprint, Stack], ranks: Ranges = ()) -> Lasts:
    """The longest of what these ranks do, of all if none are named."""
    named = set(ranks_in(ranks))
    mine = list(only(seen, named.__contains__) if named else seen)
    if mine and all(each.doing.activity is Activity.UNSEEN for each in mine) and not named:
        return Lasts.LONG  # it may be anything
    return max((_lasts(each, stacks) for each in mine), default=Lasts.NO_TIME)


def _lasts(each: Seen, stacks: Mapping[Fingerprint, Stack]) -> Lasts:
    shown, activity = each.cluster.posture.rank, each.doing.activity
    if shown.state.startswith("t"):
        return Lasts.A_MINUTE  # a debugger: whoever looks into it will let it go
    if _never_ends(each, stacks):
        return Lasts.NO_TIME
    if activity in _LONG:
        return Lasts.LONG
    return Lasts.A_MINUTE if activity in _A_MINUTE else _of_kernel(each)


def _never_ends(each: Seen, stacks: Mapping[Fingerprint, Stack]) -> bool:
    """Stopped, at the end of a pipe that is silent, or in a loader that waits for idle workers."""
    shown = each.cluster.posture.rank
    if shown.state.startswith("T") or child_stopped(each, HALTS) or in_pipe(each.doing, shown):
        return True
    workers = any(child.role is Role.LOADER for child in each.cluster.posture.children)
    loads = each.doing.activity is Activity.LOADER and workers
    return loads and nature(each, stacks) is Nature.SOFTWARE


def _of_kernel(each: Seen) -> Lasts:
    """Asleep in the kernel: a storage that is slow, unless it is a driver."""
    shown = each.cluster.posture.rank
    if shown.state.startswith("D") and each.doing.activity is not Activity.DEVICE:
        return Lasts.A_MINUTE
    asleep = [c.role for c in each.cluster.posture.children if c.shown.state.startswith("D")]
    if Role.SAVER in asleep:
        return Lasts.LONG
    return Lasts.A_MINUTE if asleep else Lasts.NO_TIME
