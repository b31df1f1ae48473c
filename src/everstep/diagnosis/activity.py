"""What a process is doing, by its stack: waiting for others, or holding them up.

Used by outliers.py, and by the vote over live stacks. A rank that waits in a collective is a victim
whoever it is. One that does anything else while others wait holds them up, and what it does tells
where to look: its data loader, a checkpoint, a lock, a driver. activities.toml has the signs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import cache
from importlib import resources
from itertools import takewhile

import msgspec

from everstep.diagnosis.frames import Dump, Frame, Thread, plain, serves
from everstep.model import Value


class Activity(StrEnum):
    """What a process does at this moment; the value is how a sentence says it."""

    COLLECTIVE = "in a collective"
    PEER = "in a send or receive between two ranks"
    START = "in the start of process groups"
    SYNC = "in a wait for its device"
    DEVICE = "in a call to its device's driver"
    BACKWARD = "in the backward pass"
    CODE = "in code that shows no wait"
    LOADER = "in its data loader"
    STORAGE = "in reading or writing files"
    REMOTE = "in a call to remote storage or a service"
    SAVE = "in saving a checkpoint"
    LOAD = "in loading a checkpoint"
    EVALUATE = "in evaluation"
    COMPILE = "in a compiler"
    LOCK = "in a wait for a lock or a queue"
    GIL = "in a wait for the interpreter's lock"
    SLEEP = "in a sleep"
    DEBUGGER = "in a debugger or at a prompt"
    CHILD = "in a wait for a child process"
    COLLECT = "in garbage collection"
    EXIT = "at the end of the process"
    IMPORT = "in the import of modules"
    UNSEEN = "without a stack"


WAITS = frozenset({Activity.COLLECTIVE, Activity.PEER, Activity.START})
"""Those wait for other ranks, whatever a tool says about active and idle."""
HIDES = frozenset({Activity.SYNC, Activity.BACKWARD, Activity.CODE})
"""Those may wait for other ranks below Python: a collective on a device runs asynchronously."""
WHOLE = frozenset(
    {Activity.SAVE, Activity.LOAD, Activity.EVALUATE, Activity.LOADER, Activity.COMPILE}
)
"""Of which a smaller one (a lock, a read) may be a part; the nearest one names the whole."""
_FINAL = frozenset({Activity.DEBUGGER, Activity.EXIT, Activity.GIL, Activity.COLLECT})
"""Those are no part of anything larger."""
DRIVERS = 20
"""Frames of a device's driver that are looked through for what it was called for."""
INNERMOST = 6
"""Frames in which a sign that is not deep counts."""


class Doing(Value, frozen=True, kw_only=True):
    """What one process does."""

    activity: Activity
    call: str = ""
    """The function that showed it: all_reduce, acquire."""
    part: Activity | None = None
    """A barrier within the saving of a checkpoint, a read within a data loader: the other half."""
    at: str = ""
    """The innermost function of the user's code, as in the dump: turn (knot/loop.py:166)."""

    @property
    def waits(self) -> bool:
        """For other ranks, as far as the stack shows it."""
        return self.activity in WAITS

    def __str__(self) -> str:
        text = f"{self.activity}"
        if self.part is not None and self.part is not self.activity:
            text += f", {self.part}"
        if self.call and not self.at.startswith(f"{self.call} "):
            text += f" ({self.call})"
        return text + (f", at {self.at}" if self.at else "")


class _Sign(Value, frozen=True, kw_only=True):
    """One entry of the table."""

    activity: str
    names: tuple[str, ...] = (".*",)
    files: tuple[str, ...] = ("",)
    deep: bool = False


class _Signs(Value, frozen=True, kw_only=True):
    libraries: tuple[str, ...]
    sign: tuple[_Sign, ...]


class _Reads(Value, frozen=True, kw_only=True):
    """A sign, ready for use."""

    activity: Activity
    name: re.Pattern[str]
    file: re.Pattern[str]
    deep: bool

    def fits(self, name: str, file: str) -> bool:
        return bool(self.name.fullmatch(name) and self.file.search(file))


@cache
def _table() -> _Signs:
    text = resources.files("everstep.diagnosis").joinpath("activities.toml").read_bytes()
    return msgspec.toml.decode(text, type=_Signs)


@cache
def _library() -> re.Pattern[str]:
    return re.compile("|".join(_table().libraries))


@cache
def _signs() -> tuple[_Reads, ...]:
    return tuple(
        _Reads(
            activity=Activity[sign.activity],
            name=re.compile("|".join(sign.names)),
            file=re.compile("|".join(sign.files)),
            deep=sign.deep,
        )
        for sign in _table().sign
    )


@cache
def activity_of(name: str, file: str, *, near: bool) -> Activity | None:
    """What one frame shows; near: it is among the innermost."""
    for sign in _signs():
        if (near or sign.deep) and sign.fits(name, file):
            return sign.activity
    return None


def of_user(file: str) -> bool:
    """Whether a file is no library's."""
    return not _library().search(file)


def place_of(frames: Sequence[Frame]) -> str:
    """The innermost frame that is no library's, as it stands in a dump; empty if all are."""
    for frame in frames:
        if of_user(frame.file):
            return f"{plain(frame.name)} ({frame.file}:{frame.line})"
    return ""


def _native(thread: Thread) -> Iterator[Frame]:
    """The innermost frames up to Python's: a driver has many before what was called."""
    return takewhile(lambda frame: not frame.file.endswith(".py"), thread.frames[:DRIVERS])


def doing_of(thread: Thread) -> Doing:
    """What one thread does."""
    if not thread.frames:
        return Doing(activity=Activity.UNSEEN)
    shown = [
        (at, activity)
        for at, frame in enumerate(thread.frames)
        if (activity := activity_of(plain(frame.name), frame.file, near=at < INNERMOST))
    ]
    where = place_of(thread.frames)
    if not shown:
        return Doing(activity=Activity.CODE, call=plain(thread.frames[0].name), at=where)
    at, activity = shown[0]
    call = plain(thread.frames[at].name)
    if activity is Activity.DEVICE and Activity.SYNC in (
        *(each for _, each in shown[:INNERMOST]),
        *(activity_of(plain(f.name), f.file, near=True) for f in _native(thread)),
    ):
        activity = Activity.SYNC  # the driver's frames are within the wait
    whole = next((each for _, each in shown if each in WHOLE and each is not activity), None)
    if activity in WAITS:
        within = None if whole is Activity.LOADER else whole
        return Doing(activity=activity, call=call, part=within, at=where)
    if whole is not None and activity not in _FINAL | WHOLE:
        return Doing(activity=whole, part=activity, call=call, at=where)
    return Doing(activity=activity, call=call, at=where)


def doing(dump: Dump) -> Doing:
    """What a trainer's process does: its main thread, unless another one shows what that waits for.

    Autograd runs on threads of its own: a main thread in the backward pass, or one that shows
    nothing, gives way to a thread that waits for other ranks.
    """
    main = dump.main
    found = doing_of(main) if main is not None else Doing(activity=Activity.UNSEEN)
    if found.waits or found.activity in _FINAL:
        return found
    if gil := _wants_gil(dump):
        return gil
    if found.activity in HIDES or found.activity is Activity.UNSEEN:
        for thread in dump.threads:
            other = doing_of(thread)
            if thread is not main and other.waits and of_the_step(thread):
                return other
    return _in_kernel(dump, found)


def of_the_step(thread: Thread) -> bool:
    """Whether a side thread is the backward pass or the like, and no helper that waits on its own.

    Python starts its own threads in _bootstrap; autograd's threads are the engine's.
    """
    return not serves(thread) and not any(
        frame.name.endswith(("_bootstrap", "_bootstrap_inner")) for frame in thread.frames[-6:]
    )


def _in_kernel(dump: Dump, found: Doing) -> Doing:
    """What the kernel's own stack adds: a read that hangs shows only there."""
    for name in dump.kernel:
        activity = activity_of(name, "", near=True)
        if activity in {Activity.STORAGE, Activity.DEVICE}:
            whole = found.activity if found.activity in WHOLE else activity
            return Doing(activity=whole, part=activity, call=name, at=found.at)
    return found


def _wants_gil(dump: Dump) -> Doing | None:
    """A thread that waits for the interpreter's lock, and who holds it if the dump shows that."""
    wanting = [
        thread
        for thread in dump.threads
        if any(
            activity_of(plain(frame.name), frame.file, near=True) is Activity.GIL
            for frame in thread.frames[:INNERMOST]
        )
    ]
    if not wanting or (dump.main is not None and dump.main not in wanting):
        return None
    holding = [thread for thread in dump.threads if thread.holds_gil and thread not in wanting]
    where = doing_of(holding[0]) if holding else None
    name = plain(holding[0].frames[0].name) if holding and holding[0].frames else ""
    return Doing(
        activity=Activity.GIL,
        call=f"held in {name}" if name else "",
        at=where.at if where is not None else place_of(wanting[0].frames),
    )
