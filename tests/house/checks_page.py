"""The tables of docs/checks.md, made from the registry of checks and the docstrings of limits."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from everstep.agent.checks.check import Limits, MakeCheck
from everstep.agent.checks.registry import CHECKS, SOURCES
from everstep.commands.check_choice import listed

CHECKS_PAGE = Path(__file__).parents[2] / "docs" / "checks.md"
BEGIN = "<!-- Written by `make docs` from the registry of checks, down to the next such line. -->"
END = "<!-- Up to here. -->"


def checks_page() -> str:
    """The page with fresh tables in the place of those that are there."""
    before, _, rest = CHECKS_PAGE.read_text().partition(f"{BEGIN}\n")
    _, _, after = rest.partition(f"{END}\n")
    return "\n".join([f"{before}{BEGIN}\n", *_tables(), f"\n{END}\n{after}"])


def _tables() -> Iterator[str]:
    yield "| check | what it finds, and from where | looked at |"
    yield "|---|---|---|"
    for each in listed():
        yield _row(f"`{each.check}`", each.about, _often(each.every_s, each.source))
    yield ""
    yield "| limit | default | what it means |"
    yield "|---|---|---|"
    for name in sorted(CHECKS):
        yield from _limits(CHECKS[name])


def _often(every_s: float, source: str) -> str:
    if every_s == 0:
        return "at once"
    return f"every {every_s:g} s" + (", in a child" if SOURCES[source].blocks else "")


def _limits(check: MakeCheck) -> Iterator[str]:
    """Its own: those that every check has stand in the text."""
    default = check.limits_type()
    for name, text in _documented(check.limits_type):
        yield _row(f"`{check.name}` `{name}`", f"`{getattr(default, name)!r}`", text)


def _documented(limits: type[Limits]) -> Iterator[tuple[str, str]]:
    """Fields that this class adds, each with its docstring."""
    for kind in reversed(limits.__mro__):
        if issubclass(kind, Limits) and kind is not Limits:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
            assert isinstance(tree, ast.ClassDef)
            yield from _fields(tree.body)


def _fields(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for number, statement in enumerate(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, _docstring(body[number + 1 : number + 2])


def _docstring(after: Iterable[ast.stmt]) -> str:
    for statement in after:
        value = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return " ".join(value.value.split())
    return ""


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
