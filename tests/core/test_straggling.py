"""Who is slow is named, and nobody else."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import pytest

from everstep.core.groups import Layout, layout_of
from everstep.core.straggling import Stragglers, work_of
from everstep.events import MachineProgress
from everstep.model import Generation, LayoutSpec, MachineId, Rank, Seconds, Step
from everstep.sightings import Computes, StragglerSeen

PAIR = layout_of(LayoutSpec(dp=2), 2)
DP = layout_of(LayoutSpec(dp=8), 2)
GRID = layout_of(LayoutSpec(tp=2, dp=2, pp=2), 2)
Work = Callable[[Rank, Step], Seconds]
"""What a rank computes in a step."""


class Training:
    """Ranks that wait for the slowest of them, agents that tell of medians, looks once a second."""

    def __init__(self, layout: Layout | None, machines: int = 4) -> None:
        self.layout = layout
        self.ranks = [Rank(rank) for rank in range(2 * machines)]
        self.machine_of = {rank: MachineId(f"m{rank // 2}") for rank in self.ranks}
        self.stragglers = Stragglers()
        self.generation = Generation(1)
        self.now = 0.0
        self.step = Step(0)
        self._look_at = 0.0
        self._newest: dict[Rank, deque[Seconds]] = {}

    def restart(self) -> None:
        self.generation = Generation(self.generation + 1)
        self._newest.clear()

    def run(self, steps: int, work: Work) -> list[StragglerSeen]:
        """What is told while they do so many steps more."""
        told: list[StragglerSeen] = []
        for _ in range(steps):
            self.step = Step(self.step + 1)
            computes = {rank: work(rank, self.step) for rank in self.ranks}
            for rank, seconds in computes.items():
                self._newest.setdefault(rank, deque(maxlen=20)).append(seconds)
            step_s = max(computes.values())
            self.now += step_s
            while self._look_at <= self.now:
                self._look_at += 1.0
                told += self._look(step_s)
        return told

    def _look(self, step_s: Seconds) -> list[StragglerSeen]:
        by_machine: defaultdict[MachineId, list[Computes]] = defaultdict(list)
        for rank, newest in self._newest.items():
            if len(newest) == 20:
                told = Computes(rank=rank, seconds=statistics.median(newest))
                by_machine[self.machine_of[rank]].append(told)
        for machine in sorted(set(self.machine_of.values())):
            self.stragglers.take(
                MachineProgress(
                    machine=machine,
                    generation=self.generation,
                    slowest=self.step,
                    fastest=self.step,
                    computes=tuple(by_machine[machine]),
                )
            )
        found = self.stragglers.judge(self.layout, self.step, step_s, self._look_at)
        return [] if found is None else [found]


def jittery(seed: int, jitter: float, slow: dict[int, float] | None = None) -> Work:
    chance = random.Random(seed)
    factors = slow or {}
    return lambda rank, _: (
        0.5 * factors.get(rank, 1.0) * chance.lognormvariate(0, jitter) if jitter else 0.5
    )


@pytest.mark.parametrize("layout", [DP, GRID, None], ids=["dp", "grid", "unknown"])
@pytest.mark.parametrize("jitter", [0.02, 0.1])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_rank_that_becomes_slow_is_named_once_and_said_to_be_over_once(
    layout: Layout | None, jitter: float, seed: int
) -> None:
    training = Training(layout)
    assert training.run(200, jittery(seed, jitter)) == []
    (told,) = training.run(200, jittery(seed + 100, jitter, {5: 1.6}))
    assert (told.rank, told.machine, told.generation) == (5, "m2", 1)
    assert 0.2 < told.costs < 0.5
    assert 0.7 < told.compute_s < 0.9
    assert 0.45 < told.usual_s < 0.55
    (over,) = training.run(200, jittery(seed + 200, jitter))
    assert over.rank is None


@pytest.mark.parametrize("layout", [PAIR, DP, GRID, None], ids=["pair", "dp", "grid", "unknown"])
@pytest.mark.parametrize("jitter", [0.0, 0.03, 0.1, 0.3])
@pytest.mark.parametrize("seed", [1, 2])
def test_noise_names_nobody(layout: Layout | None, jitter: float, seed: int) -> None:
    machines = 4 if layout is None else layout.machines
    assert Training(layout, machines).run(800, jittery(seed, jitter)) == []


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_bursts_of_a_loaded_machine_name_nobody(seed: int) -> None:
    """Single steps of single ranks take several times as long."""
    chance = random.Random(seed)
    bursts = Training(DP).run(
        1000, lambda *_: 0.5 * (chance.uniform(2, 6) if chance.random() < 0.1 else 1)
    )
    assert bursts == []


def test_uneven_stages_name_nobody_and_hide_nobody() -> None:
    """The last stage computes more, and a slow rank of the first one less than those."""

    def uneven(slow: float) -> Work:
        noise = random.Random(1)
        return lambda rank, _: (
            noise.gauss(1, 0.02) * (0.8 if rank >= 4 else 0.5) * (slow if rank == 1 else 1)
        )

    training = Training(GRID)
    assert training.run(300, uneven(1.0)) == []
    (told,) = training.run(100, uneven(1.3))
    assert (told.rank, round(told.usual_s, 1)) == (1, 0.5)
    assert Training(None).run(300, uneven(1.0)) == [], "nor where nobody knows of stages"


def test_one_that_was_slow_from_the_start_is_named_only_beside_those_that_do_the_same() -> None:
    slow = {3: 1.5}
    (told,) = Training(DP).run(200, jittery(1, 0.03, slow))
    assert told.rank == 3
    assert Training(None).run(200, jittery(1, 0.03, slow)) == []


def test_a_machine_whose_ranks_are_all_slow_is_one_straggler() -> None:
    (told,) = Training(DP, machines=2).run(200, jittery(1, 0.02, {2: 1.5, 3: 1.52}))
    assert told.machine == "m1"


def test_two_machines_that_are_slow_are_no_straggler() -> None:
    assert Training(DP).run(200, jittery(1, 0.02, {0: 1.5, 5: 1.5})) == []


def test_what_costs_little_of_a_step_is_not_told() -> None:
    assert Training(DP).run(300, jittery(1, 0.02, {5: 1.05})) == []


def test_one_slow_step_and_a_slow_start_are_not_told() -> None:
    training = Training(DP)
    training.run(100, jittery(1, 0.02))
    assert training.run(60, lambda rank, step: 20.0 if (rank, step) == (2, 120) else 0.5) == []
    training.restart()
    first = training.step
    settling = training.run(100, lambda rank, step: 3.0 if step < first + 8 and rank else 0.5)
    assert settling == []


def test_a_restart_forgets_who_was_told_and_tells_again() -> None:
    training = Training(DP)
    (first,) = training.run(200, jittery(1, 0.02, {5: 1.5}))
    training.restart()
    (again,) = training.run(200, jittery(2, 0.02, {5: 1.5}))
    assert (first.generation, again.generation) == (1, 2)
    assert first.rank == again.rank == 5


def test_what_goes_with_the_rank_to_another_machine_is_its_work() -> None:
    training = Training(DP)
    assert [told.machine for told in training.run(200, jittery(1, 0.02, {0: 1.5}))] == ["m0"]
    training.restart()
    training.machine_of[Rank(0)] = training.machine_of[Rank(1)] = MachineId("m9")
    assert training.run(300, jittery(2, 0.02, {0: 1.5})) == []


def test_a_straggler_that_becomes_much_worse_is_told_again() -> None:
    training = Training(DP)
    training.run(200, jittery(1, 0.02, {5: 1.3}))
    worse = training.run(200, jittery(2, 0.02, {5: 3.0}))
    assert {told.rank for told in worse} == {5}
    assert worse[-1].costs > 0.6


def test_ranks_do_the_same_that_differ_in_data_and_tensor_parallelism_alone() -> None:
    layout = layout_of(LayoutSpec(tp=2, cp=2, dp=4, pp=2, ep=2))
    classes: defaultdict[object, list[Rank]] = defaultdict(list)
    for rank in range(layout.world_size):
        classes[work_of(layout, Rank(rank))].append(Rank(rank))
    alike: Sequence[Rank] = classes[work_of(layout, Rank(0))]
    assert alike == [0, 1, 4, 5, 8, 9, 12, 13]
    assert {len(ranks) for ranks in classes.values()} == {8}
