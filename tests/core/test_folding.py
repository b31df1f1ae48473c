"""Answers of all machines to one look become few facts, and none counts twice."""

from __future__ import annotations

from typing import Any

from everstep.core.folding import Folding
from everstep.core.intake import Intake
from everstep.diagnosis.standing import Peer
from everstep.events import MachineProgress
from everstep.looks import Posture, RankLook, Shown
from everstep.model import Generation, MachineId, Rank, Step
from everstep.sightings import MachineStacks, StacksTaken
from tests.core.shown import posture, stood


def answer(at: int, *shown: Posture, look: int = 1, action: str = "", **more: Any) -> MachineStacks:
    """Of machine `at`, which has as many ranks as postures."""
    more.setdefault("generation", Generation(1))
    return MachineStacks(
        machine=MachineId(f"m{at}"),
        action=action or f"{look}.{at}",
        look=look,
        ranks=tuple(
            RankLook(rank=Rank(at * len(shown) + local), posture=each, pid=100 + local)
            for local, each in enumerate(shown)
        ),
        **more,
    )


WAITS = posture("all_reduce")
READS = posture("reading", "S", "wait_for_partner")


def told(folding: Folding, now: float) -> StacksTaken:
    fact = folding.due(now)
    assert fact is not None
    return fact


def test_one_fact_when_all_have_answered() -> None:
    folding = Folding(machines=3)
    everybody = ((0, 5),)
    for at in (2, 0, 1):
        assert folding.due(0.5) is None
        last = READS if at == 1 else WAITS
        folding.take(
            answer(
                at,
                WAITS,
                last,
                stood=(stood((2 * at, 2 * at + 1), 9, 8, members=everybody),),
                peers=(Peer(rank=Rank(at), peer=Rank(5), sends=True),),
                unreached=(MachineId("m2"),) if at == 1 else (),
                remark="no native frames",
            ),
            0.1 * at,
        )
    assert folding.next_deadline() == float("-inf")
    fact = told(folding, 0.2)
    assert [(c.posture, c.ranks) for c in fact.clusters] == [
        (WAITS, ((0, 2), (4, 5))),
        (READS, ((3, 3),)),
    ]
    assert [(s.ranks, s.members, s.enqueued) for s in fact.stood] == [(((0, 5),), everybody, 9)]
    assert fact.actions == ("1.2", "1.0", "1.1")
    assert fact.machines == ("m2", "m0", "m1")
    assert fact.unreached == (("m1", "m2"),)
    assert len(fact.peers) == 3
    assert fact.remarks == ("no native frames",)
    assert folding.next_deadline() is None


def test_late_answers_are_told_once_a_second() -> None:
    folding = Folding(machines=3)
    folding.take(answer(0, WAITS), 10.0)
    assert folding.next_deadline() == 11.0
    assert folding.due(10.9) is None
    assert told(folding, 11.0).machines == ("m0",)
    folding.take(answer(1, WAITS), 11.2)
    assert folding.next_deadline() == 12.0
    folding.take(answer(2, READS), 11.4)
    fact = told(folding, 11.4)
    assert fact.machines == ("m1", "m2")
    assert [c.ranks for c in fact.clusters] == [((1, 1),), ((2, 2),)]


def test_a_second_answer_ends_its_order_and_counts_once() -> None:
    folding = Folding(machines=2)
    folding.take(answer(0, WAITS), 0.0)
    folding.take(answer(0, WAITS), 0.1)
    folding.take(answer(0, READS, action="again"), 0.2)
    fact = told(folding, 1.0)
    assert fact.actions == ("1.0", "again")
    assert [c.posture for c in fact.clusters] == [WAITS]
    folding.take(answer(0, WAITS), 2.0)
    assert folding.next_deadline() is None


def test_an_answer_to_an_older_look_is_dropped_and_a_newer_one_begins_anew() -> None:
    folding = Folding(machines=2)
    folding.take(answer(0, READS), 0.0)
    folding.take(answer(0, WAITS, look=2), 0.5)
    folding.take(answer(1, READS), 0.6)
    assert folding.next_deadline() == 1.5
    folding.take(answer(1, WAITS, look=2), 0.7)
    fact = told(folding, 0.7)
    assert (fact.look, [c.ranks for c in fact.clusters]) == (2, [((0, 1),)])
    folding.take(answer(0, WAITS, look=3, generation=Generation(2)), 1.0)
    assert told(folding, 2.0).generation == 2


def test_the_intake_hands_it_on_beside_progress() -> None:
    intake = Intake(machines=2)
    assert intake.take(answer(0, WAITS), 0.0) is None
    assert intake.next_deadline() == 1.0
    fact = intake.take(answer(1, Posture(rank=Shown())), 0.5)
    assert isinstance(fact, StacksTaken)
    assert intake.next_deadline() is None
    assert intake.take(answer(0, WAITS, look=2), 0.6) is None
    for at in range(2):
        intake.take(
            MachineProgress(
                machine=MachineId(f"m{at}"),
                generation=Generation(1),
                slowest=Step(1),
                fastest=Step(1),
            ),
            1.0,
        )
    assert isinstance(intake.next_fact(1.6), StacksTaken)
