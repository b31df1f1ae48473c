"""What the frozen files should hold. test_frozen.py compares, scripts/docs.py writes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import typer

from everstep.cli import app
from everstep.commands.flags import FLAGS, reference_page
from tests.house.checks_page import CHECKS_PAGE, checks_page
from tests.house.ladder_page import LADDER_PAGE, ladder_page

ROOT = Path(__file__).parents[2]
FROZEN_FLAGS = Path(__file__).with_name("flags.txt")
FLAGS_PAGE = ROOT / "docs" / "torchrun-flags.md"

__all__ = [
    "CHECKS_PAGE",
    "FLAGS_PAGE",
    "FROZEN_FLAGS",
    "LADDER_PAGE",
    "checks_page",
    "flag_lines",
    "ladder_page",
    "reference_page",
]


def flag_lines() -> list[str]:
    """One line for each argument and flag of each command."""
    lines = [f"run {'|'.join(flag.names)} {flag.kept}" for flag in FLAGS]
    for words, command in _commands(app, ""):
        function = command.callback
        assert function is not None
        name = words + (command.name or function.__name__)
        if name != "run":
            lines += [f"{name} {each}" for each in _of_signature(function)]
    return lines


def _commands(app: typer.Typer, words: str) -> Iterator[tuple[str, typer.models.CommandInfo]]:
    """Every command, with the words that come before its own."""
    yield from ((words, command) for command in app.registered_commands)
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from _commands(group.typer_instance, f"{words}{group.name} ")


def _of_signature(function: object) -> list[str]:
    assert callable(function)
    hints = get_type_hints(function, include_extras=True)
    return [_one(name, get_args(hints[name])) for name in inspect.signature(function).parameters]


def _one(name: str, annotated: tuple[object, ...]) -> str:
    kind = annotated[1]
    if isinstance(kind, typer.models.ArgumentInfo):
        return str(kind.metavar or name.upper())
    assert isinstance(kind, typer.models.OptionInfo)
    declared = [kind.default, *(kind.param_decls or ())]  # in Annotated the first is the "default"
    said = [each for each in declared if isinstance(each, str) and each.startswith("-")]
    return "|".join(said or [f"--{name.replace('_', '-')}"])
