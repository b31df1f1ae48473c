"""What the watch over the ladder sees: sequences of decisions, and what is wrong with each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from everstep.actions import (
    BeginGeneration,
    CloseIncident,
    ControllerAction,
    EvictMachine,
    FinishJob,
    OpenIncident,
    Outcome,
    Rung,
    StartRanks,
    SwitchCode,
    TakeRung,
)
from everstep.core.ladder_watch import LadderWatch
from everstep.model import (
    NO_GENERATION,
    NO_STEP,
    Generation,
    MachineId,
    NodeRank,
    PolicySpec,
    VersionId,
)

Together = list[ControllerAction]


class Story:
    """Decisions with their ids, one list for each event."""

    def __init__(self) -> None:
        self._events = 0

    def _fields(self) -> dict[str, Any]:
        self._events += 1
        return {"id": f"{self._events}.0", "cause": "1", "why": "a test"}

    def fails(self, planned: Rung | None = None) -> Together:
        generation = Generation(self._events + 1)
        return [BeginGeneration(generation=generation, planned=planned, **self._fields())]

    def opens(self, incident: str = "incident-1") -> Together:
        return [OpenIncident(incident=incident, symptom="it broke", **self._fields())]

    def closes(self) -> Together:
        return [CloseIncident(incident="incident-1", **self._fields())]

    def evicts(self) -> Together:
        return [EvictMachine(machine=MachineId("m1"), **self._fields())]

    def takes(self, rung: Rung, failure: str = "signal 6", *, switches: bool = True) -> Together:
        taken = TakeRung(incident="incident-1", rung=rung, failure=failure, **self._fields())
        if rung is Rung.HUMAN:
            finish = FinishJob(outcome=Outcome.FAILED, exit_code=1, **self._fields())
            return [taken, finish] if switches else [taken]
        if rung is not Rung.ROLLBACK or not switches:
            return [taken]
        switch = {**self._fields(), "cause": taken.id, "rolled_back": True}
        return [taken, SwitchCode(version=VersionId("a"), previous=VersionId("b"), **switch)]

    def starts(self) -> Together:
        return [
            StartRanks(
                machine=MachineId("m0"),
                generation=Generation(2),
                node_rank=NodeRank(0),
                master_addr="a",
                master_port=1,
                restore=NO_STEP,
                restore_generation=NO_GENERATION,
                restarts=1,
                **self._fields(),
            )
        ]

    def recovers(self, rung: Rung, failure: str = "signal 6") -> list[Together]:
        return [self.fails(), self.takes(rung, failure), self.starts()]


def wrong(events: Sequence[Together]) -> list[str]:
    watch = LadderWatch()
    return [said for together in events for said in watch.see(together, PolicySpec())]


def test_a_climb_with_an_eviction_and_with_what_people_asked_for_is_well() -> None:
    s = Story()
    events = [s.fails(), s.starts(), s.opens(), *s.recovers(Rung.REATTEMPT)]
    events += [*s.recovers(Rung.ROLLBACK), s.evicts(), *s.recovers(Rung.EVICT)]
    events += [*s.recovers(Rung.REATTEMPT), *s.recovers(Rung.ROLLBACK)]
    events += [s.fails(Rung.HOT_UPDATE), s.takes(Rung.HOT_UPDATE, "hot update"), s.starts()]
    events += [*s.recovers(Rung.REATTEMPT), s.closes(), s.opens(), *s.recovers(Rung.REATTEMPT)]
    assert wrong(events) == []


def test_another_class_of_failure_begins_where_it_likes() -> None:
    s = Story()
    events = [s.opens(), *s.recovers(Rung.ROLLBACK), *s.recovers(Rung.REATTEMPT, "hang")]
    assert wrong(events) == []


@pytest.mark.parametrize(
    ("rungs", "says"),
    [
        ([Rung.ROLLBACK, Rung.REATTEMPT, Rung.TEST], '"signal 6" stood at 4'),
        ([Rung.ROLLBACK, Rung.ROLLBACK, Rung.ROLLBACK], "is rollback 3 of incident-1"),
        ([Rung.EVICT], "nobody was evicted in incident-1"),
        ([Rung.REPLAY], "cannot be taken yet"),
    ],
)
def test_what_a_climb_must_not_do(rungs: list[Rung], says: str) -> None:
    s = Story()
    said = wrong([s.opens(), *(each for rung in rungs for each in s.recovers(rung))])
    assert says in "; ".join(said)


def test_a_recovery_without_a_rung_or_with_two_is_seen() -> None:
    s = Story()
    assert "follows 0 rungs (none), not 1" in wrong([s.opens(), s.fails(), s.starts()])[0]
    s = Story()
    twice = [s.takes(Rung.REATTEMPT), s.takes(Rung.REATTEMPT)]
    said = wrong([s.opens(), s.fails(), *twice, s.starts()])
    assert "follows 2 rungs (reattempt, reattempt), not 1" in said[0]


def test_a_rung_of_no_incident_or_too_late_is_seen() -> None:
    s = Story()
    assert "is of incident-1, and none is open" in wrong([s.fails(), s.takes(Rung.REATTEMPT)])[0]
    s = Story()
    late = [s.opens(), *s.recovers(Rung.REATTEMPT), s.takes(Rung.REATTEMPT)]
    assert "comes after the ranks of generation" in wrong(late)[0]


def test_a_rollback_without_other_code_and_a_human_without_an_end_are_seen() -> None:
    s = Story()
    events = [s.opens(), s.fails(), s.takes(Rung.ROLLBACK, switches=False)]
    assert "does not change the code" in wrong(events)[0]
    s = Story()
    assert wrong([s.opens(), *s.recovers(Rung.REATTEMPT), s.takes(Rung.HUMAN)]) == []
    s = Story()
    events = [s.opens(), *s.recovers(Rung.REATTEMPT), s.takes(Rung.HUMAN, switches=False)]
    assert "does not end the job" in wrong(events)[0]


def test_stacks_are_compared_of_ranks_that_run_and_before_a_group_goes_for_it() -> None:
    s = Story()
    well = [s.fails(), s.starts(), s.opens(), s.takes(Rung.AGGREGATE, "hang"), s.evicts()]
    assert wrong([*well, *s.recovers(Rung.EVICT_AGGREGATED, "hang")]) == []
    s = Story()
    early = [s.fails(), s.opens(), s.takes(Rung.AGGREGATE, "hang")]
    assert "comes while no ranks run" in wrong(early)[0]
    s = Story()
    blind = [
        s.fails(),
        s.starts(),
        s.opens(),
        s.evicts(),
        *s.recovers(Rung.EVICT_AGGREGATED, "hang"),
    ]
    assert "no stacks were compared since ranks were started" in wrong(blind)[0]


def test_a_look_climbs_no_rung_and_is_not_what_ranks_are_started_with() -> None:
    s = Story()
    events = [s.opens(), *s.recovers(Rung.REATTEMPT, "hang"), s.takes(Rung.AGGREGATE, "hang")]
    assert wrong([*events, *s.recovers(Rung.ROLLBACK, "hang")]) == []
