"""SIGKILL of the real writer at hundreds of random moments: each leaves a whole newest step."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from everstep.checkpoint import disk, slots
from everstep.checkpoint.format import Expected
from everstep.checkpoint.pins import pin_for_disk
from everstep.model import Copy, Generation, Rank, Step
from tests.checkpoint.lockstep import Counters, fork, kill, train
from tests.checkpoint.plain import check, content, save, writer

RANKS = [Rank(0), Rank(1)]

SEEDS = int(os.environ.get("EVERSTEP_SOAK_SEEDS", "2"))
"""`make soak` takes more."""


class Victims:
    """Two ranks, killed and restarted again and again as the controller would do it."""

    def __init__(self, shm: Path, seed: int) -> None:
        self.shm = shm
        self.rng = random.Random(seed)
        self.generation = 0
        self.restored = -1
        self.counters = Counters(len(RANKS), self.restored)
        self.pids: list[int] = []

    def start(self) -> None:
        self.generation += 1
        self.counters = Counters(len(RANKS), self.restored)
        for rank in RANKS:
            slots.drop_newer(self.shm, rank, Step(self.restored))
        self.pids = [
            fork(partial(train, self.shm, rank, self.generation, self.counters)) for rank in RANKS
        ]

    def wait_for(self, step: int) -> None:
        deadline = time.monotonic() + 30
        while max(self.counters.all()) < step:
            assert time.monotonic() < deadline, f"writers hang at {self.counters.all()}"
            time.sleep(100e-6)

    def kill_at_random(self) -> int:
        """Kill both, some random instants after a random step; the newest step both finished."""
        self.wait_for(self.restored + self.rng.randint(1, 5))
        until = time.perf_counter() + self.rng.random() * 400e-6
        while time.perf_counter() < until:
            pass
        self.rng.shuffle(self.pids)
        self.kill_all()
        return min(self.counters.all())

    def kill_all(self) -> None:
        while self.pids:
            kill(self.pids.pop())

    def check(self, finished: int) -> None:
        """Nothing torn is listed, and the newest common step is the promised one."""
        found = [slots.inventory(self.shm, [rank]) for rank in RANKS]
        for copies in found:
            for copy in copies:
                check(self.shm, copy)
        self.restored = newest_common(found)
        assert self.restored in (finished, finished - 1)


@pytest.fixture(params=range(SEEDS))
def victims(shm: Path, request: pytest.FixtureRequest) -> Iterator[Victims]:
    """One pair of ranks for each seed."""
    pair = Victims(shm, request.param)
    yield pair
    pair.kill_all()


def newest_common(found: list[list[Copy]]) -> int:
    common = set.intersection(*({(c.step, c.generation) for c in copies} for copies in found))
    return max((step for step, _ in common), default=-1)


def test_each_of_sixty_kills_leaves_the_newest_finished_step_or_the_one_before(
    victims: Victims,
) -> None:
    for _ in range(60):
        victims.start()
        if victims.rng.random() < 0.3:
            ahead = victims.restored + victims.rng.randint(-1, 2)
            pin_for_disk(victims.shm, victims.rng.choice(RANKS), Step(max(ahead, 0)))
        victims.check(victims.kill_at_random())


@pytest.mark.parametrize("victims", [7], indirect=True)
def test_a_step_pinned_ahead_gets_to_disk_whole_while_its_rank_goes_on_and_is_killed(
    victims: Victims, tmp_path: Path
) -> None:
    shm = victims.shm
    for _ in range(12):
        step = Step(victims.restored + 3)
        for rank in RANKS:
            pin_for_disk(shm, rank, step)
        victims.start()
        victims.wait_for(step + 8)
        for rank in RANKS:
            disk.persist(shm, rank, step, tmp_path)
            pin_for_disk(shm, rank, None)
        victims.check(victims.kill_at_random())
        generation = Generation(victims.generation)
        disk.publish(tmp_path, step, generation, world_size=2, keep=2)
        for rank in RANKS:
            shard = disk.read(tmp_path, Expected(step=step, rank=rank, generation=generation))
            shard.verify()
            assert shard.crc is not None
            assert shard.payload == content(rank, step, generation)


@pytest.mark.parametrize("victims", [3], indirect=True)
def test_a_step_that_is_overwritten_while_it_is_persisted_is_lost_and_never_torn(
    victims: Victims, tmp_path: Path
) -> None:
    """Without a pin, the writer overwrites what is being read: that must always be noticed."""
    victims.start()
    victims.wait_for(5)
    outcomes = {"whole": 0, "lost": 0}
    for _ in range(150):
        copies = slots.inventory(victims.shm, [Rank(0)])
        try:
            path = disk.persist(victims.shm, Rank(0), copies[-1].step, tmp_path)
        except (slots.ShardLost, slots.ShardMissing):
            outcomes["lost"] += 1
        else:
            step = copies[-1].step
            assert path.read_bytes()[4096:] == content(0, step, victims.generation)
            outcomes["whole"] += 1
    assert outcomes["lost"] > 0


def persist_for_ever(shm: Path, directory: Path, counters: Counters) -> None:
    """Save, persist and publish one step after the other, alone: agent, ranks and controller."""
    writers = [writer(shm, rank) for rank in RANKS]
    while True:
        step = Step(counters.all()[0] + 1)
        for rank, shards in zip(RANKS, writers, strict=True):
            save(shards, rank, step)
            disk.persist(shm, rank, step, directory)
        disk.publish(directory, step, Generation(1), world_size=2, keep=2)
        counters.finish(0, step)


def test_each_of_forty_kills_while_steps_go_to_disk_leaves_the_published_ones_whole(
    shm: Path,
) -> None:
    directory = shm / "disk"  # a kill takes nothing from a file: what fsync does is not at stake
    rng = random.Random(11)
    counters = Counters(1, -1)
    kills = struck = 0
    while kills < 40 or not struck:
        assert kills < 400, "no kill fell into the writing of a file"
        kills += 1
        pid = fork(partial(persist_for_ever, shm, directory, counters))
        goal = counters.all()[0] + rng.randint(1, 2)
        deadline = time.monotonic() + 30
        while counters.all()[0] < goal:
            assert time.monotonic() < deadline, f"nothing is published after step {goal - 1}"
            time.sleep(100e-6)
        until = time.perf_counter() + rng.random() * 4e-3
        while time.perf_counter() < until:
            pass
        kill(pid)
        done = counters.all()[0]
        steps = [entry.step for entry in disk.published(directory)]
        assert steps[-1] in (done, done + 1)
        assert len(steps) >= min(2, done + 1)
        struck += any(directory.glob("step-*/*.tmp"))
        for step in steps:
            for rank in RANKS:
                shard = disk.read(directory, Expected(step=step, rank=rank))
                shard.verify()
                assert shard.payload == content(rank, step, 1)
