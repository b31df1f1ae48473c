"""For commands that monitors call: 2 means a broken machine there, never a wrong flag.

Used by cli.py for `everstep check`, which also has more flags than a function has parameters.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, get_type_hints

import typer
from typer.core import TyperCommand

from everstep.commands.check_report import Status
from everstep.model import EverstepError


class Plugin(TyperCommand):
    """A command whose wrong flags are "unknown", as the guidelines for Nagios plugins want it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.Exit:  # of --help
            raise
        except Exception as error:
            # Errors of flags have this field, and others no use for it.
            error.exit_code = Status.UNKNOWN  # type: ignore[attr-defined]
            raise


def takes(flags: Callable[..., Any]) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Let typer see the fields of this class as flags, and the function get them as one."""
    parameters = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=getattr(flags(), name)
        )
        for name, kind in get_type_hints(flags, include_extras=True).items()
    ]

    def decorate(function: Callable[[Any], None]) -> Callable[..., None]:
        def given(**fields: Any) -> None:
            function(flags(**fields))

        given.__name__, given.__doc__ = function.__name__, function.__doc__
        given.__annotations__ = {each.name: each.annotation for each in parameters}
        given.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return given

    return decorate


def answer(work: Callable[[], int]) -> int:
    """Its exit code; 3 and a sentence if it could not be done as asked."""
    try:
        return work()
    except (EverstepError, OSError) as error:
        sys.stdout.write(f"EVERSTEP {Status.UNKNOWN.name} - {error}\n")
        return Status.UNKNOWN
