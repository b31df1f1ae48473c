"""For commands that monitors call: 2 means a broken machine there, never a wrong flag.

Used by cli.py for `everstep check`. `takes` is also for others that have more flags than a function
has parameters.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from enum import IntEnum
from typing import Any, get_type_hints

import typer
from typer.core import TyperCommand

from everstep.model import EverstepError, Seconds

TIME_LIMIT_S: Seconds = 30.0
"""For all checks. Slurm ends its HealthCheckProgram after 60 s, Nagios a plugin after as much."""


class Status(IntEnum):
    """Exit codes of Nagios plugins."""

    OK = 0
    """Nothing failed, and something was checked."""
    WARNING = 1
    """Something should be looked at; the machine may go on."""
    CRITICAL = 2
    """The machine should get no work: at least one result would evict it."""
    UNKNOWN = 3
    """Nothing failed, and something could not be checked that should have been."""


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
    """Let typer see the fields of this named tuple as flags, and the function get them as one."""
    defaults = getattr(flags, "_field_defaults", {})
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=kind,
            default=defaults.get(name, inspect.Parameter.empty),
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
