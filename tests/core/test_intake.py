"""Progress of all machines becomes one fact a second."""

from __future__ import annotations

from typing import Any

from everstep.core.intake import Intake
from everstep.events import MachineGroups, MachineProgress, StepProgress
from everstep.model import (
    CheckpointSpec,
    Generation,
    GroupShape,
    JobId,
    JobSpec,
    LayoutSpec,
    MachineId,
    Rank,
    RankPhase,
    SeenGroups,
    Step,
)
from everstep.sightings import ActivitySeen, Computes, MachineActivity, StragglerSeen


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


def test_a_long_phase_of_any_rank_is_told_and_grows_older_meanwhile() -> None:
    intake = Intake(machines=3)
    intake.report(progress("m0", 3, phase=RankPhase.TRAINING, phase_s=500.0), 10.0)
    intake.report(progress("m1", 3, phase=RankPhase.SAVING, phase_s=4.0), 10.0)
    fact = intake.report(progress("m2", 3, phase=RankPhase.EVALUATING, phase_s=5.0), 10.5)
    assert fact is not None
    assert (fact.phase, fact.phase_s) == (RankPhase.EVALUATING, 5.0)
    intake.report(progress("m2", 4), 10.6)
    later = intake.due(11.5)
    assert later is not None
    assert (later.phase, later.phase_s) == (RankPhase.SAVING, 5.5)


def test_of_agents_that_say_nothing_of_phases_ranks_train() -> None:
    fact = Intake(machines=1).report(progress("m0", 3), 10.0)
    assert fact is not None
    assert (fact.phase, fact.phase_s) == (RankPhase.TRAINING, 0.0)


def told_of_a_straggler(intake: Intake, spec: JobSpec | None) -> list[StragglerSeen]:
    """Rank 1 computes longer than rank 0, from the start."""
    if spec is not None:
        intake.expect(spec)
    told = []
    for second in range(120):
        for rank, seconds in ((0, 0.5), (1, 0.9)):
            report = progress(
                f"m{rank}",
                2 * second,
                step_s=0.9,
                computes=(Computes(rank=Rank(rank), seconds=seconds),),
            )
            intake.report(report, float(second))
        while intake.next_deadline() == float("-inf"):
            fact = intake.next_fact(float(second))
            told += [fact] if isinstance(fact, StragglerSeen) else []
    return told


def spec(layout: LayoutSpec | None) -> JobSpec:
    return JobSpec(
        job=JobId("job"),
        uid="00000000",
        command=("train.py",),
        working_dir="/",
        nnodes=2,
        nproc_per_node=1,
        checkpoint=CheckpointSpec(directory="/nowhere"),
        layout=layout,
    )


def test_a_straggler_is_told_once_beside_progress_where_ranks_do_the_same() -> None:
    (told,) = told_of_a_straggler(Intake(machines=2), spec(LayoutSpec(dp=2)))
    assert (told.rank, told.machine, round(told.costs, 2)) == (1, "m1", 0.44)


def test_ranks_of_two_stages_or_of_an_unknown_layout_are_no_peers() -> None:
    assert told_of_a_straggler(Intake(machines=2), spec(LayoutSpec(pp=2))) == []
    assert told_of_a_straggler(Intake(machines=2), spec(None)) == []
    assert told_of_a_straggler(Intake(machines=2), None) == []


def test_the_layout_that_ranks_show_makes_them_peers() -> None:
    intake = Intake(machines=2)
    intake.expect(spec(None))
    shown = SeenGroups(mesh=(GroupShape(name="dp", factors=((1, 2),)),))
    for machine in ("m0", "m1"):
        intake.groups(
            MachineGroups(machine=MachineId(machine), generation=Generation(1), seen=shown)
        )
    (told,) = told_of_a_straggler(intake, None)
    assert told.rank == 1


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


# --- quiet ranks ---------------------------------------------------------------------------------


def activity(machine: str, quiet_s: float, generation: int = 1, **more: Any) -> MachineActivity:
    return MachineActivity(
        machine=MachineId(machine), generation=Generation(generation), quiet_s=quiet_s, **more
    )


def seen(fact: object) -> ActivitySeen:
    assert isinstance(fact, ActivitySeen), fact
    return fact


def test_a_job_is_quiet_when_all_its_machines_are_and_as_long_as_the_last_of_them() -> None:
    intake = Intake(machines=2)
    assert intake.take(activity("m0", 30.0, idle_s=40.0, no_traffic_s=35.0), 100.0) is None
    assert intake.next_deadline() is None, "one of them alone wakes nobody"
    fact = seen(intake.take(activity("m1", 12.0, idle_s=13.0), 102.0))
    assert (fact.generation, fact.quiet_s, fact.idle_s) == (1, 12.0, 13.0)
    assert fact.no_traffic_s is None, "one of them cannot tell"


def test_while_it_lasts_it_is_told_every_five_seconds_with_what_passed_meanwhile() -> None:
    intake = Intake(machines=2)
    intake.take(activity("m0", 10.0, idle_s=10.0, no_traffic_s=20.0), 0.0)
    assert intake.take(activity("m1", 11.0, idle_s=15.0, no_traffic_s=12.0), 1.0) is not None
    assert intake.take(activity("m0", 15.0, idle_s=15.0, no_traffic_s=25.0), 5.0) is None
    fact = seen(intake.take(activity("m1", 16.0, idle_s=20.0, no_traffic_s=17.0), 6.0))
    assert (fact.quiet_s, fact.idle_s, fact.no_traffic_s) == (16.0, 16.0, 17.0)


def test_its_end_is_told_once() -> None:
    intake = Intake(machines=2)
    assert intake.take(activity("m0", 0.0), 0.0) is None
    intake.take(activity("m0", 10.0), 1.0)
    intake.take(activity("m1", 10.0), 1.0)
    assert seen(intake.take(activity("m1", 0.0), 2.0)).quiet_s == 0.0
    assert intake.take(activity("m0", 0.0), 2.5) is None
    assert intake.next_deadline() is None


def test_who_speaks_again_does_not_hide_who_says_no_more() -> None:
    intake = Intake(machines=2)
    intake.take(activity("m0", 10.0), 100.0)
    intake.take(activity("m1", 10.0), 101.0)
    intake.take(activity("m0", 20.0), 110.0)
    assert intake.next_deadline() == 116.0, "m1 said it last at 101"
    assert seen(intake.next_fact(116.0)).quiet_s == 0.0


def test_a_machine_that_says_no_more_is_not_known_to_be_quiet() -> None:
    """Its agent was replaced, or is not heard: the next one has to see for itself."""
    intake = Intake(machines=1)
    intake.take(activity("m0", 10.0), 100.0)
    deadline = intake.next_deadline()
    assert deadline == 115.0
    assert seen(intake.next_fact(deadline)).quiet_s == 0.0
    assert intake.next_deadline() is None
    assert seen(intake.take(activity("m0", 10.0), 130.0)).quiet_s == 10.0


def test_what_machines_said_of_an_older_generation_does_not_count() -> None:
    intake = Intake(machines=2)
    intake.take(activity("m0", 10.0), 0.0)
    assert intake.take(activity("m1", 10.0, generation=2), 1.0) is None
    assert intake.take(activity("m0", 11.0), 1.5) is None
    assert seen(intake.take(activity("m0", 10.0, generation=2), 2.0)).generation == 2


def test_progress_is_folded_beside_it() -> None:
    intake = Intake(machines=1)
    assert intake.take(activity("m0", 10.0), 0.0) is not None
    assert intake.report(progress("m0", 3), 1.0) is not None
    intake.report(progress("m0", 4), 1.5)
    assert intake.next_deadline() == 2.0
    assert isinstance(intake.next_fact(2.0), StepProgress)
    assert intake.next_deadline() == 15.0
