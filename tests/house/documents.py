"""Reads the shell commands of README.md and docs/*.md, and how each of them is tested.

Every block fenced as `sh` follows a line of its own that says who tests it:

    <!-- test: run -->                                the block is run, line by line, as it is
    <!-- test: make TARGET... -->                     these targets exist (they take too long here)
    <!-- test: tests/integration/test_run.py::NAME -->  that test does what the block does
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_MARK = re.compile(r"<!-- test: (.+) -->")
_FENCE = re.compile(r"^( *)```(\w*)")


class Block(NamedTuple):
    """One fenced block of shell commands."""

    place: str
    """FILE:LINE."""
    mark: str
    """Who tests it; empty if nobody does."""
    commands: str


def pages() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def blocks() -> list[Block]:
    """Every block of shell commands of every page, in order."""
    return [block for page in pages() for block in _blocks(page)]


def _blocks(page: Path) -> list[Block]:
    found = []
    lines = page.read_text().splitlines()
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        if fence is None:
            number += 1
            continue
        end = next(n for n in range(number + 1, len(lines)) if lines[n].strip() == "```")
        if fence[2] in ("sh", "bash", "shell", "console"):
            commands = "\n".join(line[len(fence[1]) :] for line in lines[number + 1 : end])
            place = f"{page.relative_to(ROOT)}:{number + 1}"
            found.append(Block(place, _mark_above(lines, number), commands))
        number = end + 1
    return found


def _mark_above(lines: list[str], fence: int) -> str:
    """The mark on the nearest line above that is not empty."""
    above = next((line for line in reversed(lines[:fence]) if line.strip()), "")
    mark = _MARK.search(above)
    return mark[1] if mark else ""
