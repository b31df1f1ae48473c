"""A job whose code lies in a directory of its own: for test_recovery.py and test_evictions.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from everstep.commands.client import Client
from everstep.controller.version_views import VersionView
from everstep.controller.views import EvictionView, IncidentView, StatusView
from everstep.core.state import Phase
from everstep.model import MachineId
from everstep.processes import Process, read_pid_file
from tests.integration.command import (
    Everstep,
    everstep_in,
    left_of,
    status_of,
    wait_until,
)

TRAIN = """
import os, pathlib, time
import everstep
from kernels import loss_of

class Box:
    def __init__(self):
        self.step = -1
    def state_dict(self):
        return {"step": self.step}
    def load_state_dict(self, state):
        self.step = state["step"]

def meet(step):
    # The ranks do each step together, as in a collective.
    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    here = pathlib.Path("meet") / attempt
    here.mkdir(parents=True, exist_ok=True)
    (here / rank).write_text(str(step))
    others = [here / str(other) for other in range(int(os.environ["WORLD_SIZE"]))]
    while any(not (other.exists() and int(other.read_text() or -1) >= step) for other in others):
        time.sleep(0.002)
        if pathlib.Path("finish").exists():
            break

if __name__ == "__main__":
    run, box = everstep.attach(), Box()
    ckpt = run.checkpoint({"box": box})
    start = ckpt.restore()
    for step in run.steps(start=start, stop=1_000_000):
        if pathlib.Path("finish").exists():
            break
        meet(step)
        loss = loss_of(step, step - start)
        box.step = step
        time.sleep(0.02)
        run.report(loss=loss)
        ckpt.save(step)
"""
"""Trains until somebody puts a file `finish` into the working directory."""
GOOD = "def loss_of(step, since):\n    return 2.5\n"


class Job:
    """A job of local machines whose code lies in a directory of its own."""

    def __init__(self, everstep: Everstep, machines: int, standbys: int) -> None:
        self.everstep = everstep
        self.machines = machines
        self.standbys = standbys
        self.code = everstep.directory / "code"
        self.paths = everstep.job("j")

    def write(self, directory: Path, kernels: str) -> Path:
        directory.mkdir(exist_ok=True)
        (directory / "train.py").write_text(TRAIN)
        (directory / "kernels.py").write_text(kernels)
        return directory

    def variant(self, kernels: str, name: str = "next") -> Path:
        """A copy of the code with another module."""
        return self.write(self.everstep.directory / name, kernels)

    def finished(self) -> int:
        status = status_of(self.paths)
        return -1 if status is None else status.furthest

    def trains_on(self, steps: int) -> None:
        """So many more steps are done."""
        goal = self.finished() + steps
        wait_until(lambda: self.finished() >= goal, f"step {goal}")

    def versions(self) -> tuple[VersionView, ...]:
        with Client(self.paths) as client:
            return client.versions().versions

    def incidents(self) -> tuple[IncidentView, ...]:
        with Client(self.paths) as client:
            return client.incidents().incidents

    def evictions(self) -> tuple[EvictionView, ...]:
        with Client(self.paths) as client:
            return client.incidents().evictions

    def status(self) -> StatusView:
        with Client(self.paths) as client:
            return client.status()

    def positions(self) -> dict[str, int | None]:
        return {each.machine: each.node_rank for each in self.status().machines}

    def rungs(self, first: int = 0) -> list[str]:
        """All that were taken, in order, from this incident on."""
        return [rung.rung for each in self.incidents()[first:] for rung in each.rungs]

    def running(self) -> str:
        """Name of the version that runs."""
        return next(view.name for view in self.versions() if view.condition == "running")

    def conditions(self) -> list[str]:
        return [version.condition for version in self.versions()]

    def services(self) -> list[Process | None]:
        """All that lives as long as a machine does."""
        return [
            read_pid_file(self.paths.machine(MachineId(f"m{number}")).pid_file(service))
            for number in range(self.machines)
            for service in ("keeper", "agent", "launcher")
        ]

    def runs(self) -> bool:
        status = status_of(self.paths)
        return status is not None and status.phase is Phase.RUNNING


@contextmanager
def started(
    directory: Path, *, machines: int = 2, standbys: int = 0, kernels: str = GOOD
) -> Iterator[Job]:
    """A job that trains; at the end it is told to finish, must end well and leave nothing."""
    with everstep_in(directory) as everstep:
        job = Job(everstep, machines, standbys)
        script = job.write(job.code, kernels) / "train.py"
        sizes = ("--local-machines", str(machines), "--nproc-per-node", "1")
        spare = ("--standbys", str(standbys)) if standbys else ()
        with everstep.popen("run", *sizes, *spare, "--job", "j", script) as viewer:
            wait_until(lambda: job.finished() >= 0, "the first step")
            yield job
            (directory / "finish").touch()
            _, said = viewer.communicate(timeout=60)
            assert viewer.returncode == 0, said
        assert not left_of(job.paths)
