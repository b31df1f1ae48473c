"""The one form of all benchmarks: flags, machine line, table for people, flat JSON for programs.

Every script in bench/ measures something, makes a Row of each figure and hands them to `report`.
A figure with an aim that it does not reach is shown as "short of aim": nothing is hidden, and
nothing fails, because absolute times on a shared machine prove little.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple


class Row(NamedTuple):
    """One figure."""

    key: str
    value: Any
    """A number, an object of numbers, a bool, or None for what could not be measured."""
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""
    """For None: why. Otherwise what the figure is, if the key does not say it."""

    @property
    def aim(self) -> str:
        if self.at_most is not None:
            return f"<= {self.at_most:g}"
        return "" if self.at_least is None else f">= {self.at_least:g}"

    @property
    def short(self) -> bool:
        """Whether there is an aim and a figure, and the figure misses the aim."""
        if self.value is None:
            return False
        over = self.at_most is not None and self.value > self.at_most
        under = self.at_least is not None and self.value < self.at_least
        return over or under


def arguments(description: str) -> argparse.Namespace:
    """The flags that every benchmark has: `quick` and `json`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer repeats: within 60 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser.parse_args()


def machine() -> str:
    """One line on what the figures were measured with."""
    model = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return (
        f"{os.cpu_count()} cores of {model}, Linux {platform.release()}, "
        f"Python {platform.python_version()}, torch {version('torch')}, "
        f"everstep {version('everstep')}, load {os.getloadavg()[0]:.1f}"
    )


def report(rows: list[Row], to: Path | None) -> None:
    """Print the table and write the JSON."""
    if to is not None:
        content = {row.key: row.value for row in rows} | {"machine": machine()}
        to.write_text(json.dumps(content, indent=2) + "\n")
    table([(row.key, _shown(row.value), row.aim, _remark(row)) for row in _flat(rows)])
    print(machine())


def table(lines: Sequence[Sequence[str]]) -> None:
    """Print lines of cells in columns: the first two as names and numbers are read."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    print()
    for line in lines:
        cells = [
            cell.rjust(width) if column == 1 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _flat(rows: list[Row]) -> list[Row]:
    """Objects of figures as one line each, below their own name."""
    lines = []
    for row in rows:
        if isinstance(row.value, dict):
            lines.append(Row(row.key, "", note=row.note))
            lines += [Row(f"  {key}", value) for key, value in row.value.items()]
        else:
            lines.append(row)
    return lines


def _remark(row: Row) -> str:
    return "; ".join(part for part in ("short of aim" if row.short else "", row.note) if part)


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
