"""What the tests of keeper, launcher and agent share: waiting for a condition, and /proc."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_Found = TypeVar("_Found")
DEADLINE_S = 30.0
"""Far above any honest wait: only a broken promise takes that long."""


def wait_for(what: str, look: Callable[[], _Found | None], within_s: float = DEADLINE_S) -> _Found:
    """The first true thing that `look` finds; fails the test if it never finds one."""
    deadline = time.monotonic() + within_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline, f"waited {within_s} s in vain for {what}"
        time.sleep(0.005)


def lines(path: Path) -> list[str]:
    """The whole lines of a file that may not exist yet."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(") ")[2][0] not in "ZX"
