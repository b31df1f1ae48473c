"""What the watch over looks sees: sequences of decisions, and what is wrong with each."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.actions import (
    BeginGeneration,
    CollectStacks,
    ControllerAction,
    JudgeStacks,
    SendStacks,
)
from everstep.core.look_watch import LookWatch
from everstep.looks import Fingerprint, LookResult, Purpose
from everstep.model import Generation, MachineId

MEMBERS = [MachineId("m0"), MachineId("m1")]
FIELDS: dict[str, Any] = {"id": "5.0", "cause": "5", "why": "a test"}
BEGIN = BeginGeneration(generation=Generation(1), **FIELDS)


def collect(look: int, machine: str = "m0", **more: Any) -> CollectStacks:
    fields = {"generation": Generation(1), "within_s": 30.0, **FIELDS, **more}
    return CollectStacks(machine=MachineId(machine), look=look, **fields)


def judge(look: int, result: LookResult, *machines: str) -> JudgeStacks:
    named = tuple(map(MachineId, machines))
    return JudgeStacks(look=look, result=result, machines=named, **FIELDS)


def wrong(*actions: ControllerAction) -> str:
    watch = LookWatch()
    said = [said for action in (BEGIN, *actions) for said in watch.see(action, MEMBERS)]
    return "; ".join(said)


def test_two_looks_that_agree_are_well_and_so_is_what_went_on_afterwards() -> None:
    first: list[ControllerAction] = [collect(1), collect(1, "m1"), judge(1, LookResult.AGAIN)]
    assert not wrong(*first, collect(2), judge(2, LookResult.MACHINES, "m1"))
    assert not wrong(*first, judge(1, LookResult.WENT_ON))


@pytest.mark.parametrize(
    ("actions", "says"),
    [
        ([collect(2)], "is of look 2, the newest is 0"),
        ([collect(1), collect(1)], "asks m0 twice"),
        ([collect(1, "m7")], "goes to m7, which has no position"),
        ([collect(1, generation=Generation(2))], "is not of generation 1"),
        ([collect(1), judge(1, LookResult.MACHINES, "m1")], "follows from one look"),
        ([collect(1), judge(1, LookResult.CODE)], "follows from one look"),
        ([collect(1), collect(2), judge(2, LookResult.MACHINES)], "names nobody"),
        ([collect(1), collect(2), judge(2, LookResult.MACHINES, "m9")], "which has no position"),
        ([collect(1), judge(1, LookResult.AGAIN), judge(1, LookResult.CODE)], "judged before"),
        ([judge(1, LookResult.AGAIN)], "is of look 1, the newest is 0"),
        (
            [collect(1, purpose=Purpose.ASKED), judge(1, LookResult.NOTHING)],
            "is more than a person asked for",
        ),
        (
            [
                collect(1),
                SendStacks(machine=MachineId("m1"), look=1, stacks=(Fingerprint("f"),), **FIELDS),
            ],
            "is of look 1, the newest is 1",
        ),
    ],
)
def test_what_a_look_must_not_lead_to(actions: list[ControllerAction], says: str) -> None:
    assert says in wrong(*actions)
