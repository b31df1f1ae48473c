"""One job over the hosts of a Network: the same `everstep run` on each of them.

Used by test_network.py and by bench/detection.py. The first host has the controller; hosts beyond
the job's size are its standbys.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from everstep.cluster.cleanup import clean_job
from everstep.commands import offline
from everstep.controller.views import IncidentView, MachineView, StatusView
from everstep.core.state import Phase
from everstep.journal.records import JournalError, Reader, Record
from everstep.journal.snapshots import RECORDS
from everstep.model import JobId
from everstep.paths import JobPaths
from tests.integration.network import Network, network

PORT = 29400
PATIENCE_S = 90.0
"""Only a defect takes so long."""
NAME = JobId("spread")
TRAINING = """
import time
import torch
import torch.distributed as dist
import everstep

run = everstep.attach()
dist.init_process_group("gloo")
model = torch.nn.Linear(100, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
ckpt = run.checkpoint({"model": model, "optimizer": optimizer})
for step in run.steps(start=ckpt.restore(), stop=1_000_000):
    model(torch.ones(4, 100)).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
    run.report(loss=2.5)
    ckpt.save(step)
"""


class Size(NamedTuple):
    """How many hosts train, and how many wait."""

    nnodes: int
    standbys: int


class Spread:
    """The job as somebody on its first host sees it."""

    def __init__(self, net: Network, directory: Path, size: Size) -> None:
        self.net = net
        self.size = size
        self.job = JobPaths(directory / "state", NAME)
        self._directory = directory
        self._calls: list[subprocess.Popen[bytes]] = []

    def start(self, environ: Callable[[int], Mapping[str, str]], *flags: str) -> None:
        """Start it everywhere; returns when all ranks train and the standbys are there.

        `environ`: what is added to the environment of a host.
        """
        script = self._directory / "train.py"
        script.write_text(TRAINING)
        for host in range(sum(self.size)):
            self._call(host, environ(host), (*flags, str(script)))
        self.wait(self._trains, "all hosts train")

    def end(self) -> None:
        for call in self._calls:
            call.kill()
            call.wait()
        if self.job.root.exists():
            clean_job(self.job.root)

    def status(self) -> StatusView | None:
        """As the journal says it; asking the controller needs its network."""
        try:
            return offline.status(self.job)
        except JournalError:
            return None

    def incidents(self) -> tuple[IncidentView, ...]:
        return offline.incidents(self.job).incidents

    def records(self) -> list[Record]:
        return [entry.record for entry in Reader(self.job.journal / RECORDS)]

    def wait(self, holds: Callable[[StatusView], object], what: str) -> StatusView:
        """The first status for which it holds."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            status = self.status()
            if status is not None and holds(status):
                return status
            assert time.monotonic() < deadline, f"waited in vain until {what}; {self._said()}"
            time.sleep(0.3)

    def machine(self, host: int) -> MachineView:
        """The machine that this host is."""
        address = self.net.address(host)
        status = self.wait(lambda status: status.machines, "there are machines")
        return next(machine for machine in status.machines if machine.address == address)

    def host_at(self, node_rank: int) -> int:
        """The host that has this position."""
        return next(
            host for host in range(sum(self.size)) if self.machine(host).node_rank == node_rank
        )

    def _trains(self, status: StatusView) -> bool:
        all_here = len(status.machines) == sum(self.size)
        return all_here and status.phase is Phase.RUNNING and status.finished_by_all > 20

    def _call(self, host: int, environ: Mapping[str, str], words: tuple[str, ...]) -> None:
        flags = [
            *("--job", NAME, "--nnodes", str(self.size.nnodes)),
            *("--standbys", str(self.size.standbys), "--nproc-per-node", "1"),
            *("--rdzv-endpoint", f"{self.net.address(0)}:{PORT}"),
            *("--local-addr", self.net.address(host)),
        ]
        with (self._directory / f"host-{host}.log").open("wb") as log:
            call = subprocess.Popen(
                [*self.net.inside(host), sys.executable, "-m", "everstep", "run", *flags, *words],
                cwd=self._directory,
                env={**os.environ, **environ, "EVERSTEP_HOME": str(self.job.root.parent)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._calls.append(call)

    def _said(self) -> str:
        logs = sorted(self._directory.glob("host-*.log"))
        return "\n".join(f"{log.name}: {log.read_text()[-500:]}" for log in logs)


@contextmanager
def spread(directory: Path, size: Size, leaves: int = 1) -> Iterator[Spread]:
    """A job to be started; nothing of it is left, whatever happened."""
    with network(sum(size), leaves) as net:
        made = Spread(net, directory, size)
        try:
            yield made
        finally:
            made.end()


def over(interface: str) -> Callable[[int], Mapping[str, str]]:
    """An environment in which gloo trains over this interface, on every host."""
    return lambda host: {"GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
