"""Reads the small files of /sys and /proc. For the sources here, some of which run every second.

Paths are strings and files are read with three system calls: pathlib and buffered files would cost
three times as much, hundreds of times a second on a machine with many network cards.
"""

from __future__ import annotations

import os

from everstep.agent.checks.check import Here

ATTRIBUTE_BYTES_MAX = 4096
"""One page: the kernel gives no more for an attribute."""


def place(here: Here, absolute: str) -> str:
    """The path on this machine, as `Here.path` has it."""
    return here.root.rstrip("/") + absolute


def read(path: str) -> bytes:
    """Content of an attribute without white space around it. OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        return os.read(handle, ATTRIBUTE_BYTES_MAX).strip()
    finally:
        os.close(handle)


def read_long(path: str, most_bytes: int = 1 << 18) -> str:
    """Content of a table such as /proc/net/route, cut off after so many bytes. OSError."""
    parts = []
    left = most_bytes
    handle = os.open(path, os.O_RDONLY)
    try:
        while left > 0 and (part := os.read(handle, min(left, 1 << 16))):
            parts.append(part)
            left -= len(part)
    finally:
        os.close(handle)
    return b"".join(parts).decode(errors="replace")


def text(path: str) -> str:
    """The attribute as text; empty if it cannot be read."""
    try:
        return read(path).decode(errors="replace")
    except OSError:
        return ""


def number(path: str) -> int | None:
    """The attribute as a whole number; None if it cannot be read or is none."""
    try:
        return int(read(path))
    except (OSError, ValueError):
        return None


def listed(path: str) -> list[str]:
    """What the directory holds, sorted. OSError."""
    return sorted(os.listdir(path))  # noqa: PTH208 - see above


def names(path: str) -> list[str]:
    """The same; nothing if it cannot be read."""
    try:
        return listed(path)
    except OSError:
        return []


def is_there(path: str) -> bool:
    return os.path.exists(path)  # noqa: PTH110 - see above


def link_name(path: str) -> str:
    """Last part of what a symbolic link points to; empty if there is none."""
    try:
        return os.path.basename(os.readlink(path))  # noqa: PTH115, PTH119 - see above
    except OSError:
        return ""
