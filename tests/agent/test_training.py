"""Promises of agent and launcher together, with torch: restart after restart on fresh ports."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from everstep.events import MachineJoined, RankExited
from everstep.model import ExitStatus, Generation, Rank
from everstep.trainer.heartbeat import SlotReader
from tests.agent.fake_controller import FakeController
from tests.agent.support import Job, lines, wait_for

pytestmark = pytest.mark.torch
KILLS = 20

SCRIPT = """
    import os, time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print("ready", int(total), os.environ["MASTER_PORT"])
    while True:
        time.sleep(0.01)
        dist.all_reduce(total)
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, FakeController]]:
    job = Job(tmp_path_factory.mktemp("training"), f"t{os.getpid()}")
    job.describe(["train.py"], env={"GLOO_SOCKET_IFNAME": "lo"})
    controller = FakeController(job.paths)
    job.start("agent", "launcher")
    controller.get(MachineJoined)
    yield job, controller
    job.stop()
    controller.stop()


def test_twenty_kills_in_a_row_are_twenty_good_restarts(job: tuple[Job, FakeController]) -> None:
    """Rank 0's TCPStore listens on the port that the agent holds reserved, another every time."""
    machine, controller = job
    machine.script("train.py", SCRIPT)
    slots = SlotReader(machine.shm / "heartbeat", 2)
    ports = set()
    for number in range(KILLS):
        generation = machine.next_generation()
        controller.start_ranks(generation)
        said = [_first_line(machine, generation, Rank(rank)) for rank in (0, 1)]
        assert [words[:2] for words in said] == [["ready", "2"]] * 2
        ports.add(said[0][2])
        victim = slots.read()[number % 2]
        assert victim is not None
        os.kill(victim.pid, signal.SIGKILL)
        ended = _end_of(controller, generation, victim.rank)
        assert ended.exit == ExitStatus(signal=9)
    slots.close()
    assert len(ports) == KILLS


def test_ranks_forked_ahead_outlive_the_proof_that_old_ranks_are_gone(
    job: tuple[Job, FakeController],
) -> None:
    machine, controller = job
    machine.script("train.py", SCRIPT)
    controller.start_ranks(machine.next_generation())
    parked = machine.parked()
    generation = machine.next_generation()
    controller.start_ranks(generation)
    slots = SlotReader(machine.shm / "heartbeat", 2)
    beats = [beat for beat in slots.read() if beat is not None]
    slots.close()
    assert {beat.pid for beat in beats} == parked
    assert {beat.generation for beat in beats} == {generation}


def _first_line(machine: Job, generation: Generation, rank: Rank) -> list[str]:
    log = machine.machine.rank_log(generation, rank)
    return wait_for(f"rank {rank} of generation {generation}", lambda: lines(log))[0].split()


def _end_of(controller: FakeController, generation: Generation, rank: int) -> RankExited:
    return controller.get(RankExited, lambda e: (e.generation, e.rank) == (generation, rank))


def test_a_failing_script_is_told_with_its_traceback(job: tuple[Job, FakeController]) -> None:
    machine, controller = job
    machine.script("train.py", "def f():\n    raise ValueError('bad data')\nf()")
    generation = machine.next_generation()
    controller.start_ranks(generation)
    ended = controller.get(RankExited, lambda event: event.generation == generation)
    assert ended.exit == ExitStatus(code=1)
    assert ended.error is not None
    assert (ended.error.kind, ended.error.message) == ("ValueError", "bad data")
    assert ended.error.traceback == ended.last_lines
    assert 'train.py", line 2, in f' in ended.last_lines
