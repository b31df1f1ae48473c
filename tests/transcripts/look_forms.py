"""The short forms of transcripts that are about looks; transcript.py says what they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from everstep.actions import CollectStacks, SendStacks
from everstep.events import ControllerEvent
from everstep.looks import Cluster, Posture, Ranges
from everstep.model import MachineId, Rank
from everstep.sightings import ActivitySeen, StacksSent, StacksTaken, StragglerSeen
from tests.core.shown import STACKS, shown, worker

if TYPE_CHECKING:
    from tests.transcripts.transcript import Transcript


def _looked(run: Transcript, names: list[str], fields: dict[str, str]) -> Iterator[ControllerEvent]:
    orders = [run.order(CollectStacks, MachineId(name)) for name in names]
    unreached = [pair.split(":") for pair in fields.pop("unreached", "").split(",") if pair]
    yield StacksTaken(
        generation=orders[0].generation,
        look=orders[0].look,
        actions=tuple(order.id for order in orders),
        machines=tuple(order.machine for order in orders),
        clusters=tuple(
            Cluster(posture=_posture(word), ranks=_ranges(text)) for word, text in fields.items()
        ),
        unreached=tuple((MachineId(a), MachineId(b)) for a, b in unreached),
    )


def _posture(word: str) -> Posture:
    own, *children = (part.partition("/") for part in word.split("+"))
    return Posture(
        rank=shown(own[0], own[2] or "S"),
        children=tuple(worker(child[0], child[2] or "S") for child in children),
    )


def _ranges(text: str) -> Ranges:
    pairs = (part.split("-") for part in text.split(","))
    return tuple((int(pair[0]), int(pair[-1])) for pair in pairs)


def _texts(run: Transcript, names: list[str], fields: dict[str, str]) -> Iterator[ControllerEvent]:
    for name in names:
        order = run.order(SendStacks, MachineId(name))
        known = () if "lost" in fields else (STACKS[stack] for stack in order.stacks)
        yield StacksSent(
            machine=order.machine, action=order.id, look=order.look, stacks=tuple(known)
        )


def _quiet(run: Transcript, names: list[str], fields: dict[str, str]) -> Iterator[ControllerEvent]:
    traffic = fields.get("no_traffic")
    yield ActivitySeen(
        generation=run.core.state.generation,
        quiet_s=float(names[0]),
        no_traffic_s=None if traffic is None else float(traffic),
    )


def _straggler(
    run: Transcript, names: list[str], fields: dict[str, str]
) -> Iterator[ControllerEvent]:
    over = names[0] == "none"
    yield StragglerSeen(
        generation=run.core.state.generation,
        rank=None if over else Rank(int(names[0])),
        machine=None if over else MachineId(names[1]),
        costs=float(fields.get("costs", "0")),
        why=fields.get("why", "").replace("_", " "),
    )


Short = Callable[["Transcript", list[str], dict[str, str]], Iterator[ControllerEvent]]

LOOK_FORMS: dict[str, Short] = {
    "looked": _looked,
    "texts": _texts,
    "quiet": _quiet,
    "straggler": _straggler,
}
