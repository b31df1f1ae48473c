"""What the agent makes of its ranks' paces."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from everstep.agent.paces import SETTLING, STEPS, Paces
from everstep.agent.progress import Progress
from everstep.core.agent import AgentCore
from everstep.core.agent_io import RanksAdopted, SendReport
from everstep.events import MachineProgress
from everstep.model import Generation, MachineId, PolicySpec, Rank, RankPhase
from everstep.sightings import Computes
from everstep.trainer.heartbeat import Heartbeat, SlotWriter
from everstep.trainer.pace import FILE, Pace, PaceWriter

SECOND_NS = 1_000_000_000


class Machine:
    """Ranks that write their paces."""

    def __init__(self, shm: Path, ranks: int) -> None:
        self.shm = shm
        self.rank_of = {index: Rank(8 + index) for index in range(ranks)}
        self.paces = Paces(shm / FILE, ranks)
        self.writers = [PaceWriter(shm / FILE, index) for index in range(ranks)]

    def train(self, *seconds: float, generation: int = 1, steps: int = SETTLING + STEPS) -> None:
        """So many steps, of this many seconds for each rank; the agent looks at every one."""
        for step in range(steps):
            for index, compute_s in enumerate(seconds):
                pace = Pace(generation=generation, phase=RankPhase.TRAINING, step=step)
                pace.compute_s = 99.0 if step < SETTLING else compute_s
                self.writers[index].write(pace)
            self.computes(generation)

    def computes(self, generation: int = 1) -> tuple[Computes, ...]:
        return self.paces.read(Generation(generation), self.rank_of).computes


def test_the_median_of_the_newest_steps_is_told_without_the_first_ones(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 2)
    machine.train(1.0, 2.0, steps=SETTLING + STEPS - 1)
    assert machine.computes() == ()
    machine.train(1.0, 2.0)
    told = {each.rank: each.seconds for each in machine.computes()}
    assert told == {8: 1.0, 9: 2.0}
    machine.writers[0].write(Pace(generation=1, step=1000, compute_s=50.0))
    assert machine.computes()[0].seconds == 1.0, "one slow step"


def test_of_many_ranks_the_slowest_and_the_fastest_are_told(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 4)
    machine.train(1.0, 3.0, 0.5, 2.0)
    assert [(each.rank, each.seconds) for each in machine.computes()] == [(9, 3.0), (10, 0.5)]


def test_a_new_generation_begins_anew_and_a_look_at_an_old_one_costs_nothing(
    tmp_path: Path,
) -> None:
    machine = Machine(tmp_path, 1)
    machine.train(1.0)
    machine.train(2.0, generation=2)
    assert machine.computes(1) == ()
    assert [each.seconds for each in machine.computes(2)] == [2.0]
    machine.train(3.0, generation=3, steps=3)
    assert machine.computes(3) == ()


def test_work_that_is_not_known_is_not_told(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1)
    machine.train(float("nan"))
    assert machine.computes() == ()


@pytest.mark.parametrize(
    ("phases", "told"),
    [
        ([(RankPhase.TRAINING, 900), (RankPhase.TRAINING, 10)], RankPhase.TRAINING),
        ([(RankPhase.TRAINING, 900), (RankPhase.EVALUATING, 10)], RankPhase.EVALUATING),
        ([(RankPhase.SAVING, 5), (RankPhase.EVALUATING, 10)], RankPhase.EVALUATING),
        ([(RankPhase.STARTING, 5), (RankPhase.TRAINING, 10)], RankPhase.STARTING),
        ([(RankPhase.ENDED, 50), (RankPhase.TRAINING, 10)], RankPhase.TRAINING),
        ([(RankPhase.ENDED, 50), (RankPhase.ENDED, 10)], RankPhase.ENDED),
    ],
)
def test_a_long_phase_wins_and_of_several_the_longest(
    tmp_path: Path, phases: list[tuple[RankPhase, int]], told: RankPhase
) -> None:
    machine = Machine(tmp_path, len(phases))
    now_ns = time.monotonic_ns()
    for writer, (phase, seconds) in zip(machine.writers, phases, strict=True):
        writer.write(Pace(generation=1, phase=phase, since_ns=now_ns - seconds * SECOND_NS))
    seen = machine.paces.read(Generation(1), machine.rank_of)
    assert seen.phase is told
    assert seen.phase_s >= max(seconds for phase, seconds in phases if phase is told)


def test_ranks_of_an_everstep_without_paces_are_seen_as_before(tmp_path: Path) -> None:
    slot = SlotWriter(tmp_path / "heartbeat", 0)
    slot.write(Heartbeat(generation=1, rank=0, pid=1, start_ticks=1, step=7, attached=True))
    for paces in ("missing", "a directory"):
        if paces == "a directory":
            (tmp_path / FILE).unlink()
            (tmp_path / FILE).mkdir()
        seen = Progress(tmp_path / "heartbeat", 1).read(Generation(1))
        assert seen is not None
        assert (seen.slowest, seen.phase, seen.computes) == (7, RankPhase.TRAINING, ())


def test_the_controller_is_told_what_the_slots_and_paces_say(tmp_path: Path) -> None:
    slot = SlotWriter(tmp_path / "heartbeat", 0)
    slot.write(Heartbeat(generation=1, rank=8, pid=1, start_ticks=1, step=7, attached=True))
    machine = Machine(tmp_path, 1)
    progress = Progress(tmp_path / "heartbeat", 1)
    for step in range(SETTLING + STEPS):
        machine.writers[0].write(
            Pace(generation=1, step=step, compute_s=1.5, phase=RankPhase.SAVING)
        )
        seen = progress.read(Generation(1))
    assert seen is not None
    core = AgentCore(MachineId("m0"), PolicySpec(), 1)
    core.handle(RanksAdopted(generation=Generation(1), ranks=()), 0.0)
    (said,) = core.handle(seen, 5.0)
    assert isinstance(said, SendReport)
    assert isinstance(said.report, MachineProgress)
    assert said.report.phase is RankPhase.SAVING
    assert said.report.phase_s > 0
    assert said.report.computes == (Computes(rank=Rank(8), seconds=1.5),)
