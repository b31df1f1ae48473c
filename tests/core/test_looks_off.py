"""--no-hang-detection: nothing is looked into by itself, and people may still look."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from everstep.actions import CollectStacks, OpenIncident
from everstep.core.controller import ControllerCore
from everstep.events import (
    ControllerStarted,
    JobSubmitted,
    MachineJoined,
    RanksStarted,
    RanksStopped,
    StepProgress,
    TimerFired,
)
from everstep.model import (
    CheckpointSpec,
    Generation,
    JobId,
    JobSpec,
    MachineId,
    PolicySpec,
    Step,
    Term,
)
from everstep.sightings import ActivitySeen, StacksRequested

MINE = MachineId("m0")


def training(policy: PolicySpec, steps: int = 20) -> ControllerCore:
    """One machine that trains at step 20, at second 20."""
    core = ControllerCore()
    spec = JobSpec(
        job=JobId("j"),
        uid="0",
        command=("t.py",),
        working_dir="/",
        nnodes=1,
        nproc_per_node=2,
        checkpoint=CheckpointSpec(directory="/c"),
        policy=policy,
    )
    core.handle(JobSubmitted(spec=spec), 0.0)
    core.handle(ControllerStarted(term=Term(1), version="0"), 0.0)
    joined = MachineJoined(
        machine=MINE, agent="a", address="x", host="h", version="0", generation=Generation(0)
    )
    core.handle(joined, 1.0)
    core.handle(TimerFired(), 5.0)
    generation = core.state.generation
    (stop,) = core.outstanding(MINE)
    stopped = RanksStopped(machine=MINE, action=stop.id, generation=generation, store_port=1)
    core.handle(stopped, 6.0)
    (start,) = core.outstanding(MINE)
    core.handle(RanksStarted(machine=MINE, action=start.id, generation=generation), 7.0)
    for step in range(steps):
        progress = StepProgress(
            generation=generation,
            finished_by_all=Step(step),
            finished_by_one=Step(step),
            step_s=0.5,
        )
        core.handle(progress, 10.0 + step / 2)
    return core


@pytest.mark.parametrize("on", [True, False])
def test_a_stall_is_looked_into_unless_that_is_off(on: bool) -> None:
    core = training(replace(PolicySpec(), looks=on))
    decided = core.handle(TimerFired(), 60.0)
    assert any(isinstance(each, OpenIncident) for each in decided) is on
    assert any(isinstance(each, CollectStacks) for each in decided) is on


@pytest.mark.parametrize(("at", "pauses"), [(21.0, False), (60.0, True)])
def test_a_person_may_look_all_the_same_and_ranks_that_advance_are_not_paused(
    at: float, pauses: bool
) -> None:
    core = training(PolicySpec(looks=False))
    (decided,) = core.handle(StacksRequested(by="anna"), at)
    assert isinstance(decided, CollectStacks)
    assert decided.why == "anna wants to see the stacks"
    assert decided.native is pauses


@pytest.mark.parametrize("quiet_s", [0.0, 5.0])
def test_ranks_that_tell_of_no_steps_are_paused_only_if_they_are_quiet(quiet_s: float) -> None:
    core = training(PolicySpec(looks=False), steps=0)
    core.handle(ActivitySeen(generation=core.state.generation, quiet_s=quiet_s), 20.0)
    (decided,) = core.handle(StacksRequested(by="anna"), 21.0)
    assert isinstance(decided, CollectStacks)
    assert decided.native is (quiet_s > 0)
