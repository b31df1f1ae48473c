"""Larger worlds in which ranks hang, slow down and pause: who is blamed, and that it is judged."""

from __future__ import annotations

import re
from itertools import pairwise

import msgspec
import pytest

import everstep.core.stalls
import everstep.core.verdicts
from everstep.actions import Outcome
from everstep.core.aggregate import Conclusion, Taken
from everstep.core.look_state import Look, Watching
from everstep.looks import LookResult
from everstep.model import CheckpointSpec, Every, NodeRank, PolicySpec, Rank, RankPhase
from everstep.sim.hanging import Pause
from everstep.sim.options import MANY, Harm, Options
from everstep.sim.run import Report, RunFailed, run
from tests.sim.test_seeds import mild


def hanging(seed: int, *harms: Harm, pauses: tuple[Pause, ...] = (), nnodes: int = 6) -> Options:
    """Two ranks on each of six machines, and standbys."""
    options = mild(seed, *harms)
    spec = msgspec.structs.replace(
        options.spec,
        nnodes=nnodes,
        layout=None,
        elastic=None,
        nproc_per_node=2,
        standbys=4,
        checkpoint=CheckpointSpec(directory="/checkpoints", disk_every=Every(steps=10)),
        policy=PolicySpec(recoveries_max=MANY, stall_max_s=120.0),
    )
    return msgspec.structs.replace(
        options,
        spec=spec,
        steps=100,
        step_s=1.0,
        slow=0.0,
        jitter=0.1,
        pauses=pauses,
        harm_every_s=25.0,
        safety_s=150.0,
    )


def told(options: Options) -> tuple[Report, str]:
    """What became of a run, and everything that happened in it."""
    lines: list[str] = []
    report = run(options, lines.append)
    assert report.outcome is Outcome.FINISHED, report
    return report, "\n".join(lines)


def results(said: str) -> set[str]:
    """What looks came to."""
    return set(re.findall(r"JudgeStacks .*? result=([a-z ]+) machines=", said))


def pause(phase: RankPhase, *, every: int, declared: bool, alone: bool = False) -> Pause:
    return Pause(phase=phase, every=every, takes_s=60.0, declared=declared, alone=alone)


def test_ranks_that_hang_are_found_whatever_holds_them() -> None:
    """blame.py judges who goes for it; here, that everything happens and costs little time."""
    seen: set[str] = set()
    for seed in range(3):
        report, said = told(hanging(seed, Harm.HANG))
        seen |= results(said)
        times = said.count("--- hang")
        assert report.virtual_s < 125.0 + 60.0 * times, report
    assert {LookResult.AGAIN, LookResult.MACHINES, LookResult.CODE} <= seen


@pytest.mark.parametrize(
    "pauses",
    [
        (
            pause(RankPhase.EVALUATING, every=30, declared=True),
            pause(RankPhase.SAVING, every=50, declared=True, alone=True),
        ),
        (pause(RankPhase.EVALUATING, every=40, declared=False),),
        (pause(RankPhase.SAVING, every=40, declared=False, alone=True),),
        (pause(RankPhase.COMPILING, every=0, declared=False),),
    ],
)
def test_a_healthy_pause_stops_no_rank(pauses: tuple[Pause, ...]) -> None:
    report, said = told(hanging(1, pauses=pauses))
    assert (report.generations, report.evictions) == (2, 0), report
    assert results(said) <= {LookResult.WORKS, LookResult.WENT_ON}
    looked = pauses[0].every > 0 and not pauses[0].declared
    assert (LookResult.WORKS in results(said)) == looked


def test_a_machine_that_no_other_reaches_goes_although_it_is_heard_of() -> None:
    said = "\n".join(told(hanging(seed, Harm.SEVER))[1] for seed in range(2))
    assert "EvictMachine" in said
    assert "MachineSilent" not in said.partition("EvictMachine")[0].rpartition("--- sever")[2]


def test_one_slow_rank_goes_for_what_it_costs() -> None:
    evicted = sum(told(hanging(seed, Harm.SLOW_DOWN))[0].evictions for seed in range(2))
    assert evicted > 0


def test_a_controller_that_dies_while_it_looks_names_nobody_else() -> None:
    """blame.py says who is to be named; here, that controllers died in the middle of it."""
    died = 0
    for seed in range(2, 6):
        _, said = told(msgspec.structs.replace(hanging(seed, Harm.HANG), killed_in_turn=0.01))
        order = re.findall(r"CollectStacks|JudgeStacks|ControllerStarted", said)
        died += ("CollectStacks", "ControllerStarted") in pairwise(order)
    assert died > 1


def test_people_see_stacks_and_nothing_is_stopped() -> None:
    report, said = told(hanging(1, Harm.ASK_FOR_STACKS))
    assert results(said) == {LookResult.SHOWN}
    assert (report.generations, report.evictions) == (2, 0)


# --- the judges can see --------------------------------------------------------------------------


def first_failure(*harms: Harm, pauses: tuple[Pause, ...] = ()) -> str:
    for seed in range(6):
        try:
            run(hanging(seed, *harms, pauses=pauses))
        except RunFailed as problem:
            return str(problem)
    raise AssertionError("nobody noticed")


def names_the_first(taken: Taken) -> Conclusion:
    return Conclusion(
        result=LookResult.MACHINES, why="so be it", ranks=(Rank(0),), machines=(NodeRank(0),)
    )


def test_a_core_that_blames_another_machine_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everstep.core.verdicts, "conclude", names_the_first)
    said = first_failure(Harm.HANG)
    assert re.search(r"names m\d+ \(by itself\), while (m\d+|nobody) held the job up", said)


def test_a_core_that_takes_a_pause_for_a_hang_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everstep.core.verdicts, "conclude", names_the_first)
    monkeypatch.setattr(everstep.core.verdicts, "_moved", lambda *_: False)
    said = first_failure(pauses=(pause(RankPhase.EVALUATING, every=20, declared=False),))
    assert "did not stand still" in said


def test_a_core_that_notices_no_hang_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everstep.core.stalls, "due", lambda state, now: None)
    assert "and nobody stops it" in first_failure(Harm.HANG)


def test_a_core_that_is_content_with_one_look_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(watching: Watching, look: Look) -> Look:
        return look

    monkeypatch.setattr(everstep.core.verdicts, "_former", at_once)
    assert "follows from one look" in first_failure(Harm.HANG)
