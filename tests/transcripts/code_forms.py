"""The short forms of transcripts that are about code; transcript.py says what they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from everstep.actions import HoldVersion, TryVersion
from everstep.events import (
    ControllerEvent,
    MachineReady,
    RollbackRequested,
    UpdateRequested,
    VersionHeld,
    VersionNotHeld,
    VersionTried,
)
from everstep.model import NO_VERSION, CodeVersion, MachineId, Rank, Step, VersionId
from everstep.sightings import BadNumber, LossesCompared

if TYPE_CHECKING:
    from tests.transcripts.transcript import Transcript


_Kind = TypeVar("_Kind", HoldVersion, TryVersion)


def versions_in(text: str) -> tuple[VersionId, ...] | None:
    """Of a machine that joins: "none" is an agent that knows of none."""
    if text == "none":
        return None
    return tuple(VersionId(word) for word in text.split(",") if word)


def _update(run: Transcript, names: list[str], fields: dict[str, str]) -> Iterator[ControllerEvent]:
    """Built on what came before it, unless base= says otherwise."""
    state = run.core.state
    known = state.versions.get(VersionId(names[0]))
    newest = next(reversed(state.versions), NO_VERSION) if known is None else known.code.base
    code = CodeVersion(
        version=VersionId(names[0]),
        source="/home/anna/gpt",
        base=VersionId(fields.get("base", newest)),
        includes=versions_in(fields.get("includes", "")) or (),
    )
    yield UpdateRequested(
        code=code,
        by=fields.get("by", "anna"),
        note=_text(fields.get("note", "")),
        urgent="lazy" not in fields,
        within_s=float(fields.get("lazy", "0")),
        overlap=int(fields.get("overlap", "0")),
        untried="untried" in fields,
    )


def _rollback(
    run: Transcript, names: list[str], fields: dict[str, str]
) -> Iterator[ControllerEvent]:
    del run
    yield RollbackRequested(
        by=fields.get("by", "anna"),
        note=_text(fields.get("note", "")),
        version=VersionId(names[0]) if names else None,
    )


def _orders(
    run: Transcript, kind: type[_Kind], names: list[str], fields: dict[str, str]
) -> list[_Kind]:
    """Outstanding ones of these machines, of the version if one is named."""
    found = [
        order
        for name in names
        for order in run.core.outstanding(MachineId(name))
        if isinstance(order, kind) and fields.get("version", order.version) == order.version
    ]
    assert found, f"no {kind.__name__} is outstanding for {names}"
    return found


def _held(run: Transcript, names: list[str], fields: dict[str, str]) -> Iterator[ControllerEvent]:
    for order in _orders(run, HoldVersion, names, fields):
        yield VersionHeld(machine=order.machine, action=order.id, version=order.version)


def _not_held(
    run: Transcript, names: list[str], fields: dict[str, str]
) -> Iterator[ControllerEvent]:
    for order in _orders(run, HoldVersion, names, fields):
        yield VersionNotHeld(
            machine=order.machine,
            action=order.id,
            version=order.version,
            reason=_text(fields.get("reason", "no space left on device")),
        )


def _tried(run: Transcript, names: list[str], fields: dict[str, str]) -> Iterator[ControllerEvent]:
    for order in _orders(run, TryVersion, names, fields):
        problem = _text(fields.get("problem", ""))
        yield VersionTried(
            machine=order.machine,
            action=order.id,
            version=order.version,
            problem=problem,
            detail=f"Traceback: {problem}" if problem else "",
            untold=_text(fields.get("untold", "")),
        )


def _compared(
    run: Transcript, names: list[str], fields: dict[str, str]
) -> Iterator[ControllerEvent]:
    state = run.core.state
    differs = None
    if "differs" in fields:
        rank, step = fields["differs"].split(":")
        differs = BadNumber(rank=Rank(int(rank)), step=Step(int(step)))
    for name in names:
        yield LossesCompared(
            machine=MachineId(name),
            generation=state.generation,
            first=Step(int(fields["first"])),
            last=Step(int(fields["last"])),
            compared=int(fields.get("compared", "10")),
            differs=differs,
            before=float(fields["before"]) if "before" in fields else None,
            after=float(fields["after"]) if "after" in fields else None,
        )


def _ready(run: Transcript, names: list[str], fields: dict[str, str]) -> Iterator[ControllerEvent]:
    del run, fields
    for name in names:
        yield MachineReady(machine=MachineId(name))


def _text(word: str) -> str:
    return word.replace("_", " ")


Short = Callable[["Transcript", list[str], dict[str, str]], Iterator[ControllerEvent]]

CODE_FORMS: dict[str, Short] = {
    "update": _update,
    "rollback": _rollback,
    "held": _held,
    "not_held": _not_held,
    "tried": _tried,
    "compared": _compared,
    "ready": _ready,
}
