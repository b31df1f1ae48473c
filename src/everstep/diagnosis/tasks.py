"""Whose memory it was: the kernel's table of tasks, which it prints before it kills one of them.

Used by logs.py. A machine that runs out of memory for somebody else's process is no fault of the
job's, though the kernel mostly kills the job's.
"""

from __future__ import annotations

import re

_TASK = re.compile(
    r"\[ *(?P<pid>\d+)\] +\d+ +\d+ +\d+ +(?P<pages>\d+) +\d+ .*?(?P<name>[\w./:-]+)$"
)
_TRAINS = re.compile(
    r"python|pt_|torch|train|ray|deepspeed|accelerate|mpirun|srun|slurmstepd", re.IGNORECASE
)
MOST = 0.5
"""Share of the memory of all tasks that makes one of them the cause."""


class Tasks:
    """The tables of one text."""

    def __init__(self) -> None:
        self._pages: dict[tuple[str, str], int] = {}

    def take(self, line: str) -> None:
        """One line of a table."""
        found = _TASK.search(line)
        if found is not None:
            self._pages[found["pid"], found["name"]] = int(found["pages"])

    @property
    def foreign(self) -> str | None:
        """The name of a process that is not training's and that held most of the memory."""
        if not self._pages:
            return None
        (_, name), pages = max(self._pages.items(), key=lambda entry: entry[1])
        whole = sum(self._pages.values())
        return None if _TRAINS.search(name) or pages < MOST * whole else name
