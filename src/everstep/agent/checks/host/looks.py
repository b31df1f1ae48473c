"""One look at one directory, in a thread of its own: it may never come back.

Used by the source "mounts". A network file system without its server keeps whoever asks, and no
time limit of a system call ends that. So a thread asks, a daemon that no exit waits for.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import NamedTuple

from everstep.agent.checks.check import NotReadable
from everstep.model import Seconds

_MOST = (1 << 63) - 1
"""Object stores claim to be larger than any number that can be sent."""


class Seen(NamedTuple):
    """What one directory's file system answered."""

    real: str
    """Its path without symbolic links."""
    exists: bool
    """False: what follows is about the nearest directory above it that does."""
    error: str = ""
    """Name of the error that came instead of the rest: "EIO"."""
    size: int = 0
    free: int = 0
    """Bytes that are left for ordinary users."""
    inodes: int = 0
    """0: this file system does not count them."""
    inodes_free: int = 0


class Look:
    """Asks once. Whoever made it waits as long as it likes, and may come back later."""

    def __init__(self, path: str) -> None:
        """NotReadable if no thread can be started."""
        self.path = path
        self.seen: Seen | None = None
        """None: no answer yet."""
        self.took_s: Seconds = 0.0
        self._started_s = time.monotonic()
        self._thread = threading.Thread(target=self._ask, name=f"look {path}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise NotReadable(f"no thread for {path}: {error}") from error

    def wait(self, at_most_s: Seconds) -> Seen | None:
        """The answer, if it comes in time."""
        self._thread.join(max(0.0, at_most_s))
        return self.seen

    @property
    def hangs_s(self) -> Seconds:
        """For how long there has been no answer."""
        return time.monotonic() - self._started_s if self.seen is None else 0.0

    def _ask(self) -> None:
        seen = _look(self.path)
        self.took_s = time.monotonic() - self._started_s
        self.seen = seen


def _look(path: str) -> Seen:
    # statvfs() and not stat(): clients answer stat() from memory while their server is away.
    real, nearest, exists = path, path, True
    try:
        real = nearest = os.path.realpath(path)
        while True:
            try:
                answer = os.statvfs(nearest)
                break
            except FileNotFoundError:
                if nearest in {"", "/"}:
                    raise
                nearest, exists = os.path.dirname(nearest), False  # noqa: PTH120
    except (OSError, ValueError) as error:
        number = error.errno if isinstance(error, OSError) else None
        name = errno.errorcode.get(number or 0, type(error).__name__)
        return Seen(real, exists=name not in {"ENOENT", "ENOTDIR"}, error=name)
    return Seen(
        real,
        exists=exists,
        size=min(_MOST, answer.f_blocks * answer.f_frsize),
        free=min(_MOST, answer.f_bavail * answer.f_frsize),
        inodes=min(_MOST, answer.f_files),
        inodes_free=min(_MOST, answer.f_favail),
    )
