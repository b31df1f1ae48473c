"""SIGKILL of real training at random moments: it goes on as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.model import Step
from tests.checkpoint.lockstep import fork
from tests.trainer.surroundings import Surroundings
from tests.trainer.training import Training, train

STOP = 90


class Job:
    """One rank that is killed and restarted, and the log of every step that it ever finished."""

    def __init__(self, here: Surroundings, log: Path) -> None:
        self.here = here
        self.log = log
        self.log.touch()
        self.generation = 0
        self.restored = -1
        self.made_by = 0
        self.pid = 0
        self._leave_in, self._leave_out = os.pipe()

    def start(self, steps: int) -> None:
        """Let it finish so many steps and begin one more: it must not run away from its killer."""
        self.generation += 1
        os.close(self._leave_in)
        os.close(self._leave_out)
        self._leave_in, self._leave_out = os.pipe()
        os.write(self._leave_out, b"x" * steps)
        self.pid = fork(self._train)

    def close(self) -> None:
        os.close(self._leave_in)
        os.close(self._leave_out)
        if self.pid:
            self.kill()

    def lines(self) -> list[str]:
        """Finished lines; a kill may cut the last one off."""
        return self.log.read_text().split("\n")[:-1]

    def wait_for_lines(self, count: int) -> None:
        deadline = time.monotonic() + 20
        while len(self.lines()) < count:
            assert time.monotonic() < deadline, f"training hangs after {self.lines()[-1:]}"
            assert os.waitpid(self.pid, os.WNOHANG) == (0, 0), "training ended by itself"
            time.sleep(0.001)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pid = 0

    def _train(self) -> None:
        fd = os.open(self.log, os.O_WRONLY | os.O_APPEND)

        def finished(line: str) -> None:
            os.write(fd, f"{line}\n".encode())
            os.read(self._leave_in, 1)

        run = self.here.run(self.generation, self.restored, self.made_by)
        train(run, STOP, finished=finished)


@pytest.fixture
def job(here: Surroundings, tmp_path: Path) -> Iterator[Job]:
    warm_up()
    job = Job(here, tmp_path / "log")
    yield job
    job.close()


def warm_up() -> None:
    """The first optimizer step imports much of torch: the forked ranks shall not pay for that."""
    training = Training()
    training.forward_backward()
    training.update()


def step_of(line: str) -> int:
    return int(line.split(maxsplit=1)[0])


@pytest.mark.torch
def test_training_that_is_killed_again_and_again_computes_what_it_would_have(job: Job) -> None:
    rng = random.Random(4)
    kills = 0
    while job.restored < STOP - 12:
        steps = rng.randint(1, 4)
        goal = len(job.lines()) + steps
        job.start(steps)
        job.wait_for_lines(goal)
        until = time.perf_counter() + rng.random() * 2e-3
        while time.perf_counter() < until:
            pass
        job.kill()
        kills += 1
        finished = step_of(job.lines()[-1])
        copies = {copy.step: copy.generation for copy in job.here.copies()}
        job.restored = max(copies)
        job.made_by = copies[Step(job.restored)]
        assert job.restored in (finished, finished - 1)
    assert kills >= 15
    job.start(STOP)
    os.waitpid(job.pid, 0)
    job.pid = 0
    check_log(job)


def check_log(job: Job) -> None:
    """Every step, also those computed twice, has the loss of the run that nobody killed."""
    whole = job.here.run(generation=99)
    reference = train(whole, STOP)
    lines = job.lines()
    assert {step_of(line) for line in lines} == set(range(STOP))
    assert [line for line in lines if line != reference[step_of(line)]] == []
    assert len(lines) > STOP, "no kill cost a step: then it struck nothing"
