"""All checks there are, with the limits that a site has set.

Used by the agent, by `everstep check`, and by `everstep run` to refuse wrong limits. Children
import the module of their one source alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from everstep.agent.checks import gpu, host, kernel, net
from everstep.agent.checks.check import AnyCheck, AnySource, MakeCheck, MakeSource
from everstep.model import UserError

SOURCES: dict[str, MakeSource] = {
    source.name: source for source in (*gpu.SOURCES, *net.SOURCES, *host.SOURCES, *kernel.SOURCES)
}
CHECKS: dict[str, MakeCheck] = {
    check.name: check for check in (*gpu.CHECKS, *net.CHECKS, *host.CHECKS, *kernel.CHECKS)
}


def make_source(name: str) -> AnySource:
    return SOURCES[name]()


def make_checks(limits: Mapping[str, Mapping[str, Any]]) -> list[AnyCheck]:
    """All that are not off. UserError if a limit names no check, no field, or a wrong value."""
    unknown = sorted(set(limits) - set(CHECKS))
    if unknown:
        raise UserError(
            f"there is no check {unknown[0]!r}: `everstep check --list` shows those there are"
        )
    made = [_make(check, limits.get(name, {})) for name, check in CHECKS.items()]
    return [check for check in made if not check.limits.off]


def _make(check: MakeCheck, fields: Mapping[str, Any]) -> AnyCheck:
    known = {field.name for field in msgspec.structs.fields(check.limits_type)}
    for name in fields:
        if name not in known:
            choices = ", ".join(sorted(known))
            raise UserError(f"check {check.name} has no limit {name!r}: it has {choices}")
    try:
        return check(msgspec.convert(dict(fields), check.limits_type))
    except msgspec.ValidationError as error:
        raise UserError(f"limits of check {check.name}: {error}") from error
