"""An elastic job: a host is lost, nobody can be asked for another one, and training goes on.

Two hosts, played by two calls of `everstep run`, with one data-parallel replica each.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from everstep.controller.views import StatusView
from everstep.model import MachineId
from everstep.paths import JobPaths
from tests.integration import elastic
from tests.integration.command import Everstep, everstep_in, left_of, status_of, wait_until
from tests.integration.test_hosts import free_port

STEPS = 8
pytestmark = pytest.mark.torch


class Line(NamedTuple):
    """What one rank wrote."""

    restart: int
    what: str
    step: int
    dp: int
    shares: tuple[int, ...]
    parts: int
    digest: str


class Hosts:
    """The job and its viewers."""

    def __init__(self, everstep: Everstep) -> None:
        self.everstep = everstep
        self.port = free_port()
        self.viewers: list[subprocess.Popen[str]] = []
        self.log = everstep.directory / "log"
        self.log.mkdir()

    @property
    def paths(self) -> JobPaths:
        return self.everstep.job(f"elastic-{self.port}")

    def join(self) -> None:
        """One more host."""
        words = [
            *("run", "--nnodes", "2", "--rdzv-backend", "c10d", "--elastic-dp", "1", "--no-checks"),
            *(f"--rdzv-endpoint=127.0.0.1:{self.port}", "--backup-every", "5"),
            *(elastic.__file__, "--log", str(self.log), "--stop", str(self.log / "stop")),
        ]
        null = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.viewers.append(self.everstep.popen(*words, **null))

    def status(self) -> StatusView | None:
        return status_of(self.paths)

    def lines(self, rank: int, restart: int) -> list[Line]:
        path = self.log / f"rank-{rank}"
        found = []
        for text in path.read_text().splitlines() if path.exists() else ():
            began, what, step, dp, shares, parts, digest = text.split()
            if int(began) == restart:
                of = tuple(map(int, shares.split(",")))
                found.append(Line(restart, what, int(step), int(dp), of, int(parts), digest))
        return found

    def did(self, restart: int, ranks: int) -> bool:
        """Whether so many ranks have done some steps since this restart."""
        return all(len(self.lines(rank, restart)) > STEPS for rank in range(ranks))

    def at(self, position: int) -> MachineId:
        status = self.status()
        assert status is not None
        return next(view.machine for view in status.machines if view.node_rank == position)

    def end(self) -> None:
        (self.log / "stop").touch()
        for viewer in self.viewers:
            viewer.wait(60)


@pytest.fixture
def everstep(tmp_path: Path) -> Iterator[Everstep]:
    with everstep_in(tmp_path) as command:
        yield command


def start(everstep: Everstep) -> Hosts:
    """Two hosts that train."""
    hosts = Hosts(everstep)
    hosts.join()
    wait_until(hosts.status, "a controller")
    hosts.join()
    wait_until(lambda: hosts.did(0, 2), "steps on two hosts")
    return hosts


def lose(hosts: Hosts, position: int) -> None:
    machine = hosts.at(position)
    done = hosts.everstep("inject", "lose-machine", "--machine", machine)
    assert done.code == 0, done.err


def check_batch(hosts: Hosts, restart: int, ranks: int) -> None:
    """Every part of the global batch was computed once in every step."""
    shares = [hosts.lines(rank, restart)[-1].shares for rank in range(ranks)]
    assert sorted(part for each in shares for part in each) == [0, 1]
    assert {line.dp for line in hosts.lines(0, restart)} == {ranks}


def test_training_goes_on_with_fewer_replicas_and_grows_back(everstep: Everstep) -> None:
    hosts = start(everstep)
    lose(hosts, 0)
    wait_until(lambda: hosts.did(1, 1), "steps on one host")
    status = hosts.status()
    assert status is not None
    assert "it goes on with 1 of 2 data-parallel replicas" in " ".join(status.notes)
    hosts.join()

    lost, left = [{line.step: line for line in hosts.lines(rank, 0)} for rank in (0, 1)]
    line = hosts.lines(0, 1)[0]
    assert line.digest == left[line.step].digest, "bit for bit what it was"
    assert line.parts == left[line.step].parts, "and its own place in the data, as rank 1"
    assert line.step >= min(max(lost), max(left)) - 1, "every step is kept in memory"
    check_batch(hosts, restart=1, ranks=1)

    wait_until(lambda: hosts.did(2, 2), "steps on two hosts again")
    former = {line.step: line for line in hosts.lines(0, 1)}
    for rank in (0, 1):
        line = hosts.lines(rank, 2)[0]
        assert (line.digest, line.parts) == (former[line.step].digest, former[line.step].parts)
    check_batch(hosts, restart=2, ranks=2)
    hosts.end()
    assert not left_of(hosts.paths)
