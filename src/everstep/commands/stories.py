"""The answer to `everstep why`, for people: cause before effect, one line each.

Pure: lines of the journal's index in, text and a table out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from rich.table import Table
from rich.text import Text

from everstep.journal import StoryLine
from everstep.journal.index import Part

_LONG = 120
"""Characters of one field; the rest is in --json."""
_MANY = 4
"""Entries of a list that are still worth reading."""
_SHOWN_ELSEWHERE = ("id", "cause", "why", "action")
_LABELS: dict[str, Callable[[dict[str, Any]], str]] = {
    "OpenIncident": lambda fields: str(fields.get("incident")),
    "TakeRung": lambda fields: str(fields.get("rung")),
    "JudgeStacks": lambda fields: f"look {fields.get('look')}: {fields.get('result')}",
    "SwitchCode": lambda fields: "rolled back" if fields.get("rolled_back") else "other code",
    "RefuseUpdate": lambda _: "update refused",
    "EvictMachine": lambda fields: f"{fields.get('machine')} is evicted",
    "GiveVerdict": lambda fields: (
        f"{fields.get('machine')} is {'guilty' if fields.get('guilty') else 'innocent'}"
    ),
    "ReturnMachine": lambda fields: f"{fields.get('machine')} is a standby again",
    "CloseIncident": lambda fields: f"{fields.get('incident')} is closed",
    "FinishJob": lambda _: "the job ends",
}
"""Decisions that make the story when everything else is left out, and what they are called then."""
_FACTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "StacksTaken": lambda fields: (
        f"look {fields.get('look')}: {len(fields.get('machines', ()))} machines have answered, and"
        f" show {len(fields.get('clusters', ()))} different things"
    ),
    "StacksSent": lambda fields: (
        f"look {fields.get('look')}: {fields.get('machine')} sends the text of"
        f" {len(fields.get('stacks', ()))} stacks"
    ),
}
"""Facts whose fields are for programs, as sentences."""
_VERSION = re.compile(r"[0-9a-f]{64}")
_DIGITS = 8
"""Of the id of a code version, as in decisions."""
_SHORT_FROM = 12
"""Lines of a story that is worth telling in short first."""


def in_short(lines: list[StoryLine]) -> list[str]:
    """What happened, was tried and came of it, one sentence each; of a long story only."""
    if len(lines) < _SHORT_FROM:
        return []
    return [
        f"{line.time - lines[0].time:.2f} s: {_LABELS[line.name](line.fields)}: {line.why}"
        for line in lines
        if line.part is Part.ACTION and line.name in _LABELS
    ]


def story(lines: list[StoryLine]) -> Table:
    """Facts and decisions, with the seconds since the first of them.

    What was ordered from many machines at once, or told by them, is one line.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("s", justify="right")
    for title in ("id", "because of", "what"):
        table.add_column(title, overflow="fold")
    for line, machines in _together(lines):
        decided = line.part is Part.ACTION
        what = Text(f"{line.name}: ", style="bold" if decided else "")
        count = line.fields.get("machines_in_all", 0)
        if count > 1:
            what.append(f"{count} machines: ", style="")
        elif len(machines) > 1:
            names = ", ".join(machines[:_MANY]) + ", ..." * (len(machines) > _MANY)
            what.append(f"{len(machines)} machines ({names}): ", style="")
        what.append(line.why or facts(line), style="")
        table.add_row(f"{line.time - lines[0].time:.2f}", line.id, line.cause, what)
    return table


def _together(lines: list[StoryLine]) -> Iterator[tuple[StoryLine, list[str]]]:
    """Decisions that are alike but for the machine, the first of each with all machines."""
    for _, group in groupby(lines, _likeness):
        alike = list(group)
        yield alike[0], [str(line.fields.get("machine")) for line in alike]


def _likeness(line: StoryLine) -> tuple[str, ...]:
    if line.part is Part.ACTION and line.fields.get("machine"):
        return (line.name, line.id.partition(".")[0], line.cause, line.why)
    return (line.name, line.id)


def facts(line: StoryLine) -> str:
    """The fields that say something, as words."""
    if line.name in _FACTS:
        return _FACTS[line.name](line.fields)
    told = {
        name: value
        for name, value in line.fields.items()
        if name not in _SHOWN_ELSEWHERE and value not in (None, "", [], {}, ())
    }
    return ", ".join(f"{name} {_short(value)}" for name, value in told.items()) or "-"


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple) and len(value) > _MANY:
        return f"({len(value)} of them)"
    if isinstance(value, dict):
        value = " ".join(f"{name} {_short(part)}" for name, part in value.items() if part)
    text = " ".join(str(value).split())
    if _VERSION.fullmatch(text):
        return text[:_DIGITS]
    return text if len(text) <= _LONG else text[: _LONG - 3] + "..."
