"""The judge of code versions notices what must not be."""

from __future__ import annotations

import pytest

from everstep.actions import (
    BeginGeneration,
    ControllerAction,
    HoldVersion,
    RefuseUpdate,
    Rung,
    StartRanks,
    SwitchCode,
    TryVersion,
)
from everstep.core.code_watch import CodeWatch
from everstep.events import (
    ControllerEvent,
    JobSubmitted,
    MachineJoined,
    UpdateRequested,
    VersionHeld,
    VersionTried,
)
from everstep.model import (
    CheckpointSpec,
    CodeSpec,
    CodeVersion,
    Generation,
    JobId,
    JobSpec,
    MachineId,
    NodeRank,
    Step,
    VersionId,
)

V1, V2, V3 = VersionId("v1"), VersionId("v2"), VersionId("v3")
M0 = MachineId("m0")
SPEC = JobSpec(
    job=JobId("job"),
    uid="00000000",
    command=("train.py",),
    working_dir="/",
    nnodes=1,
    nproc_per_node=1,
    checkpoint=CheckpointSpec(directory="/checkpoints"),
    code=CodeSpec(version=V1),
)
JOINED = MachineJoined(
    machine=M0,
    agent="a",
    address="m0",
    host="h",
    version="0",
    generation=Generation(0),
    versions=(V1,),
)


def sent(version: VersionId, *, urgent: bool = True, files: int = 1) -> UpdateRequested:
    code = CodeVersion(version=version, source="/gpt", base=V1, files=files)
    return UpdateRequested(code=code, by="anna", urgent=urgent, within_s=100.0)


def hold(version: VersionId) -> HoldVersion:
    return HoldVersion(
        id="h", cause="1", why="w", machine=M0, version=version, keep=(V1,), within_s=1.0
    )


def switch(version: VersionId, previous: VersionId = V1, *, back: bool = False) -> SwitchCode:
    return SwitchCode(
        id="s", cause="1", why="w", version=version, previous=previous, rolled_back=back
    )


def start(version: VersionId) -> StartRanks:
    return StartRanks(
        id="r",
        cause="1",
        why="w",
        machine=M0,
        generation=Generation(1),
        node_rank=NodeRank(0),
        master_addr="m0",
        master_port=1,
        restore=Step(-1),
        restore_generation=Generation(0),
        restarts=0,
        version=version,
    )


def begin(rung: Rung | None = None) -> BeginGeneration:
    return BeginGeneration(id="b", cause="1", why="w", generation=Generation(1), planned=rung)


TRY = TryVersion(id="t", cause="1", why="w", machine=M0, version=V2, within_s=1.0)
HELD = VersionHeld(machine=M0, action="h", version=V2)
TRIED = VersionTried(machine=M0, action="t", version=V2)
REFUSED = RefuseUpdate(id="x", cause="1", why="w", version=V2)
GOOD: list[ControllerEvent | ControllerAction] = [sent(V2), hold(V2), HELD, TRY, TRIED]


def wrongs(story: list[ControllerEvent | ControllerAction], at: float = 0.0) -> list[str]:
    watch = CodeWatch()
    found: list[str] = []
    for each in (JobSubmitted(spec=SPEC), JOINED, *story):
        if isinstance(each, ControllerEvent):
            found += watch.hear(each, at)
        else:
            found += watch.see(each, at)
    return found


def test_an_update_as_it_should_be_is_not_objected_to() -> None:
    planned = begin(Rung.HOT_UPDATE)
    back = switch(V1, V2, back=True)
    assert wrongs([*GOOD, planned, switch(V2), start(V2), begin(), back, start(V1)]) == []


@pytest.mark.parametrize(
    ("story", "wrong"),
    [
        ([sent(V2), sent(V2, files=9)], "files and bytes"),
        ([begin(), start(V2)], "is what runs"),
        ([*GOOD, begin(), switch(V2), start(V1)], "is what runs"),
        ([sent(V2), hold(V2), TRY], "tries 'v2' where it is not"),
        ([sent(V2), begin(), switch(V2)], "which nobody has imported"),
        ([begin(), switch(V3)], "which nobody sent"),
        ([*GOOD, REFUSED, begin(), switch(V2)], "puts in place what was refused"),
        ([*GOOD, begin(), switch(V2, V3)], "and 'v1' runs"),
        ([begin(), switch(V3, back=True)], "which never ran"),
        ([*GOOD, begin(), start(V1), switch(V2)], "after the ranks of its generation"),
        ([sent(V2), begin(Rung.HOT_UPDATE)], "none was tried and is urgent or due"),
        ([sent(V2, urgent=False), *GOOD[1:], begin(Rung.HOT_UPDATE)], "is urgent or due"),
        ([begin(Rung.ROLLBACK)], "that nobody asked for"),
    ],
)
def test_what_must_not_be_is_noticed(
    story: list[ControllerEvent | ControllerAction], wrong: str
) -> None:
    found = wrongs(story)
    assert found
    assert wrong in found[0]


def test_nobody_starts_what_he_does_not_have() -> None:
    dropped = [*GOOD, hold(V3), begin(), switch(V2), start(V2)]
    assert "which does not have it" in wrongs(dropped)[0]
