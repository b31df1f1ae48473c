"""Small files of /proc and /sys, read and taken apart for the sources of this package.

What a file holds is not trusted: a number that no kernel would write is a ValueError, so that the
sample counts as "could not run" and nobody is accused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeVar

from everstep.agent.checks.check import Here

T = TypeVar("T")
_TOO_BIG = 1 << 63
"""What neither the kernel counts to nor a message of ours can carry."""


def read(here: Here, absolute: str) -> str:
    """The text of the file at this path. OSError if it cannot be read."""
    # Unbuffered and without a Path: the sources of this package read a hundred files a minute.
    with open(f"{here.root.rstrip('/')}{absolute}", "rb", 0) as file:  # noqa: PTH123
        return file.read().decode("utf-8", "replace")


def missing(here: Here, absolute: str) -> bool:
    """Whether there is no such file. One that may not even be looked at is none that is missing."""
    try:
        os.stat(f"{here.root.rstrip('/')}{absolute}")  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def integer(text: str | bytes) -> int:
    """ValueError if this is not a count."""
    value = int(text)
    if not 0 <= value < _TOO_BIG:
        raise ValueError(f"{value} is no count")
    return value


def real(text: str) -> float:
    """ValueError if this is not a measure, as "nan" is none."""
    value = float(text)
    if not 0 <= value < _TOO_BIG:
        raise ValueError(f"{value} is no measure")
    return value


def number(here: Here, absolute: str) -> int:
    """A file that holds one count."""
    return integer(read(here, absolute))


def limit(here: Here, absolute: str) -> int | None:
    """A file that holds a count, or "max": None, no limit."""
    text = read(here, absolute).strip()
    return None if text == "max" else integer(text)


def table(text: str) -> dict[str, int]:
    """Lines of a name and a count, as in /proc/meminfo and memory.events. Others are left out."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        words = line.split(None, 2)
        if len(words) > 1 and words[1].isdecimal() and len(words[1]) < len(str(_TOO_BIG)):
            found[words[0].rstrip(":")] = int(words[1])
    return found


def readable(look: Callable[[], T]) -> T | None:
    """What it gives; None if the file is missing, forbidden or holds garbage."""
    try:
        return look()
    except (OSError, ValueError):
        return None


def there(look: Callable[[], T]) -> T | None:
    """What it gives; None only if the file does not exist: this kernel does not have the signal."""
    try:
        return look()
    except FileNotFoundError:
        return None


def growth(counts: Iterable[int | None]) -> int:
    """By how much a counter has grown over these samples, oldest first.

    One that is smaller than before was reset: that is a new baseline, as is the first.
    """
    grown, before = 0, None
    for count in counts:
        if count is not None and before is not None and count > before:
            grown += count - before
        before = before if count is None else count
    return grown


def share(part: float, whole: float) -> float:
    """0 of nothing is nothing."""
    return part / whole if whole else 0.0


def percent(part: float) -> str:
    return f"{part * 100:.1f} %"


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
