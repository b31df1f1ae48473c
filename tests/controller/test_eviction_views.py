"""What people are shown of evictions and rungs: as the core has them, and how many were wrong."""

from __future__ import annotations

import pytest

from everstep.actions import Rung
from everstep.controller import version_views, views
from everstep.core.history import Condition, Eviction, Ran, VersionBook
from everstep.core.state import Incident, RungTaken, State
from everstep.model import (
    CheckpointSpec,
    CodeVersion,
    Generation,
    JobId,
    JobSpec,
    MachineId,
    Published,
    Step,
    VersionId,
)


@pytest.fixture
def state() -> State:
    """Of a job that trains."""
    return State(
        spec=JobSpec(
            job=JobId("j"),
            uid="0",
            command=("t.py",),
            working_dir="/",
            nnodes=1,
            nproc_per_node=1,
            checkpoint=CheckpointSpec(directory="/c"),
        )
    )


def evicted(*, guilty: bool | None) -> Eviction:
    return Eviction(
        machine=MachineId("m"),
        host="h",
        at=1.0,
        action="1.0",
        why="so",
        accused=True,
        member=True,
        guilty=guilty,
    )


@pytest.mark.parametrize(
    ("verdicts", "share"),
    [([], None), ([None], None), ([True], 0.0), ([True, False, None], 0.5), ([False], 1.0)],
)
def test_the_share_of_false_evictions(
    state: State, verdicts: list[bool | None], share: float | None
) -> None:
    state.evictions = [evicted(guilty=verdict) for verdict in verdicts]
    assert views.status(state, 0.0).evictions.false_share == share
    view = views.incidents(state, 0.0)
    assert view.evicted.false_share == share
    assert [each.guilty for each in view.evictions] == verdicts


def test_an_incident_shows_its_code_and_its_rungs(state: State) -> None:
    version = VersionId("ab" * 32)
    state.versions[version] = VersionBook(
        code=CodeVersion(version=version, source="/x"),
        number=4,
        by="anna",
        at=0.0,
        event=1,
        condition=Condition.ROLLED_BACK,
    )
    taken = RungTaken(
        rung=Rung.ROLLBACK,
        generation=Generation(3),
        failure="TypeError",
        at=2.0,
        action="9.1",
        why="it is the code",
    )
    state.incidents = [
        Incident(
            incident="incident-1",
            symptom="rank 0 ended",
            opened_at=1.0,
            opened_by="9.0",
            generation=Generation(2),
            furthest=Step(5),
            version=version,
            rungs=[taken],
        )
    ]
    incident = views.incidents(state, 3.0).incidents[0]
    assert (incident.version, incident.planned) == ("v4", False)
    state.versions[version].runs = [Ran(since=0.0, until=2.0, from_step=Step(0))]
    assert version_views.versions(state, 3.0).versions[0].failure == "TypeError"
    state.incidents[0].cause = "the program has an error"
    assert version_views.versions(state, 3.0).versions[0].failure == "the program has an error"
    state.versions[version].runs[0].until = 2.5
    assert version_views.versions(state, 3.0).versions[0].failure == ""  # that was another one
    rung = incident.rungs[0]
    assert (rung.rung, rung.failure, rung.why) == (Rung.ROLLBACK, "TypeError", "it is the code")
    assert (rung.generation, rung.action) == (3, "9.1")


def test_backups_that_fail_are_told_with_what_they_cost(state: State) -> None:
    assert views.status(state, 0.0).machine_safe is None
    state.safe = Published(step=Step(40), generation=Generation(1))
    state.backups_failed = 1
    assert views.status(state, 0.0).notes == ()
    state.backups_failed = 3
    status = views.status(state, 0.0)
    assert status.machine_safe == 40
    assert status.notes == (
        "the newest 3 backups failed: the loss of a machine costs the steps since step 40",
    )
