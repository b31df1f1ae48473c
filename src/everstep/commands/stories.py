"""The answer to `everstep why`, for people: cause before effect, one line each.

Pure: lines of the journal's index in, a table out.
"""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from everstep.journal import StoryLine
from everstep.journal.index import Part

_LONG = 120
"""Characters of one field; the rest is in --json."""
_MANY = 4
"""Entries of a list that are still worth reading."""
_SHOWN_ELSEWHERE = ("id", "cause", "why", "action")


def story(lines: list[StoryLine]) -> Table:
    """Facts and decisions, with the seconds since the first of them."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("s", justify="right")
    for title in ("id", "because of", "what"):
        table.add_column(title, overflow="fold")
    for line in lines:
        decided = line.part is Part.ACTION
        what = Text(f"{line.name}: ", style="bold" if decided else "")
        what.append(line.why or facts(line), style="")
        table.add_row(f"{line.time - lines[0].time:.2f}", line.id, line.cause, what)
    return table


def facts(line: StoryLine) -> str:
    """The fields that say something, as words."""
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
    return text if len(text) <= _LONG else text[: _LONG - 3] + "..."
