"""The diagram and the table of docs/ladder.md, made from the table in core/ladder.py."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from everstep.actions import Rung
from everstep.core.ladder import LADDER, NOT_YET, Ground, Row

LADDER_PAGE = Path(__file__).parents[2] / "docs" / "ladder.md"
BEGIN = "<!-- Written by `make docs` from the table of the ladder, down to the next such line. -->"
END = "<!-- Up to here. -->"


def ladder_page() -> str:
    """The page with a fresh diagram in the place of the one that is there."""
    before, _, rest = LADDER_PAGE.read_text().partition(f"{BEGIN}\n")
    _, _, after = rest.partition(f"{END}\n")
    return "\n".join([f"{before}{BEGIN}\n", *_diagram(), "", *_table(), f"\n{END}\n{after}"])


def _diagram() -> Iterator[str]:
    yield "```mermaid"
    yield "flowchart TD"
    for ground in Ground:
        yield f'    {_node(ground)}(["{ground}"])'
    for rung in dict.fromkeys(rung for row in LADDER for rung in _rungs(row)):
        yield f'    {_node(rung)}["{rung}"]'
    for row in LADDER:
        yield from _arrows(row)
    yield "    classDef later stroke-dasharray: 4 4"
    yield f"    class {','.join(_node(rung) for rung in NOT_YET)} later"
    yield "```"


def _rungs(row: Row) -> tuple[Rung, ...]:
    return row.take if isinstance(row.after, Ground) else (row.after, *row.take)


def _arrows(row: Row) -> Iterator[str]:
    """The first choice with a full line, what is taken if it cannot be with dotted ones."""
    words = f"|{row.result}|" if row.result is not None else ""
    for number, rung in enumerate(row.take):
        line = "-->" if number == 0 else "-.->"
        yield f"    {_node(row.after)} {line}{words} {_node(rung)}"


def _node(of: StrEnum) -> str:
    kind = "ground" if isinstance(of, Ground) else "rung"
    return f"{kind}_{of.name.lower()}"


def _table() -> Iterator[str]:
    yield "| after | and | the first of these that can be taken |"
    yield "|---|---|---|"
    for row in LADDER:
        what = f"*{row.after}* failure" if isinstance(row.after, Ground) else str(row.after)
        takes = ", ".join(f"{rung} (to come)" if rung in NOT_YET else rung for rung in row.take)
        yield f"| {what} | {row.result or ''} | {takes} |"
