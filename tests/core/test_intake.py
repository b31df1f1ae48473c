"""Progress of all machines becomes one fact a second."""

from __future__ import annotations

from typing import Any

from everstep.core.intake import Intake
from everstep.events import MachineGroups, MachineProgress
from everstep.model import Generation, GroupShape, MachineId, SeenGroups, Step


def progress(machine: str, slowest: int, generation: int = 1, **more: Any) -> MachineProgress:
    return MachineProgress(
        machine=MachineId(machine),
        generation=Generation(generation),
        slowest=Step(slowest),
        fastest=Step(slowest + 1),
        **more,
    )


def test_nothing_is_known_of_all_ranks_before_all_machines_spoke() -> None:
    intake = Intake(machines=2)
    assert intake.report(progress("m0", 3), 0.0) is None
    assert intake.next_deadline() is None
    fact = intake.report(progress("m1", 2, step_s=0.5, loss=1.5), 0.25)
    assert fact is not None
    assert (fact.finished_by_all, fact.finished_by_one, fact.step_s) == (2, 4, 0.5)
    assert fact.loss == 1.5


def test_after_the_first_fact_there_is_one_a_second() -> None:
    intake = Intake(machines=1)
    assert intake.report(progress("m0", 0), 10.0) is not None
    assert intake.report(progress("m0", 1), 10.2) is None
    assert intake.next_deadline() == 11.0
    assert intake.due(10.9) is None
    fact = intake.due(11.0)
    assert fact is not None
    assert fact.finished_by_all == 1
    assert fact.age_s == 0.8000000000000007
    assert intake.next_deadline() is None


def test_a_new_generation_speaks_at_once_and_the_old_one_is_forgotten() -> None:
    intake = Intake(machines=2)
    intake.report(progress("m0", 5), 0.0)
    intake.report(progress("m1", 5), 0.0)
    assert intake.report(progress("m2", 6, generation=2), 0.1) is None
    assert intake.report(progress("m1", 6, generation=1), 0.2) is None
    fact = intake.report(progress("m0", 6, generation=2), 0.3)
    assert fact is not None
    assert fact.generation == 2


def groups(machine: str, *names: str, generation: int = 1) -> MachineGroups:
    shapes = tuple(GroupShape(name=name, factors=((1, 2),)) for name in names)
    return MachineGroups(
        machine=MachineId(machine),
        generation=Generation(generation),
        seen=SeenGroups(groups=shapes),
    )


def test_groups_of_all_machines_become_one_fact_for_each_generation() -> None:
    intake = Intake(machines=2)
    assert intake.groups(groups("m0", "tp")) is None
    fact = intake.groups(groups("m1", "tp", "dp"))
    assert fact is not None
    assert [shape.name for shape in fact.seen.groups] == ["dp", "tp"]
    assert intake.groups(groups("m1", "tp", "dp")) is None  # said again to another controller

    assert intake.groups(groups("m0", "tp", generation=2)) is None
    assert intake.groups(groups("m1", "tp", "dp")) is None
    assert intake.groups(groups("m1", "tp", generation=2)) is not None
