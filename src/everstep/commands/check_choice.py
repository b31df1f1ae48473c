"""Which checks run, with which limits: --only, --limits, --check-limits, and what --list shows.

Pure but for reading the file of limits. Used by commands/check.py and, for `everstep run`, by
commands/host.py.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from everstep.agent.checks.check import AnyCheck, MakeCheck
from everstep.agent.checks.registry import CHECKS, SOURCES, make_checks
from everstep.model import Seconds, UserError, Value

FOR_A_JOB = frozenset({"gpu.memory_left"})
"""They accuse whoever uses the machine besides the job: alone, that is the job itself."""


class Listed(Value, frozen=True, kw_only=True):
    """One check as --list shows it."""

    check: str
    about: str
    source: str
    every_s: Seconds
    """Between two samples in the agent; 0: whenever there is something new."""
    limits: dict[str, Any]
    """What a site may set, with what holds if it does not."""


def listed() -> list[Listed]:
    """All there are, in the order of their names."""
    return [_listed(CHECKS[name]) for name in sorted(CHECKS)]


def chosen(only: Sequence[str], limits: Mapping[str, Mapping[str, Any]]) -> list[AnyCheck]:
    """Those that are not off and that one of the names means; UserError for a name of none.

    Of those that need a job, only what is named in full.
    """
    for name in only:
        if not any(_means(name, check) for check in CHECKS):
            raise UserError(
                f"--only {name}: there is no such check; `everstep check --list` shows all"
            )
    made = make_checks(limits)
    return [
        each
        for each in made
        if each.name in only
        or (each.name not in FOR_A_JOB and (not only or any(_means(n, each.name) for n in only)))
    ]


def read_limits(file: Path | None) -> dict[str, dict[str, Any]]:
    """Check -> its fields. Both ["net.link"] and [net.link] name a check."""
    if file is None:
        return {}
    try:
        content = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"the limits in {file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is no TOML: {error}") from error
    limits: dict[str, dict[str, Any]] = {}
    for name, fields in content.items():
        if not isinstance(fields, dict):
            raise UserError(f'{file}: {name} stands outside of a table like ["net.link"]')
        for check, its in _tables(name, fields).items():
            limits.setdefault(check, {}).update(its)
    try:
        make_checks(limits)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    return limits


def _tables(name: str, fields: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What TOML makes of [net.link], a table in a table, is the check net.link."""
    if "." not in name and fields and all(isinstance(each, dict) for each in fields.values()):
        return {f"{name}.{signal}": its for signal, its in fields.items()}
    return {name: fields}


def _means(name: str, check: str) -> bool:
    """A whole name, or the beginning of one up to its dot: "net." or "net"."""
    return check == name or check.startswith(f"{name.removesuffix('.')}.")


def _listed(check: MakeCheck) -> Listed:
    return Listed(
        check=check.name,
        about=check.about,
        source=check.source,
        every_s=SOURCES[check.source].every_s,
        limits=msgspec.to_builtins(check.limits_type()),
    )
