"""Updates, rollbacks and evictions of whole jobs: the command, real processes, real crashes.

What restarts cost is for bench/recovery.py to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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
TYPE_ERROR = "def loss_of(step, since):\n    return step + None\n"
CRASHES = """
import os, signal

def loss_of(step, since):
    if since == 100 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSEGV)
    return 2.5
"""
"""As a kernel that reads where it must not: some steps go well, more than prove a restart."""
NOT_IMPORTABLE = "import no_such_package_at_all\n\ndef loss_of(step, since):\n    return 2.5\n"
RAN_WELL_STEPS = 110
"""More than a version must do to be one to roll back to."""


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


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """One job for several tests, in any order: each counts from what it finds."""
    with started(tmp_path_factory.mktemp("pair")) as job:
        yield job


def test_a_type_error_shipped_by_a_lazy_update_is_rolled_back_by_itself(pair: Job) -> None:
    pair.trains_on(RAN_WELL_STEPS)
    runs, incidents = pair.running(), len(pair.incidents())
    sent = pair.everstep("update", pair.variant(TYPE_ERROR), "j", "--lazy", "--note", "fused")
    assert sent.code == 0, sent.err
    assert pair.conditions()[-1] == "ready", "nothing was stopped for it"
    before = pair.finished()
    assert pair.everstep("inject", "kill-rank", "j").code == 0
    wait_until(lambda: pair.conditions()[-1] == "rolled back", "the rollback")
    pair.trains_on(20)
    assert pair.running() == runs
    (incident,) = pair.incidents()[incidents:]
    assert [rung.rung for rung in incident.rungs] == ["reattempt", "rollback"]
    assert (incident.restored or 0) >= before - 10, "no more than the step under way was lost"
    story = pair.everstep("why", incident.incident, "j")
    assert "TypeError" in story.out
    assert runs in story.out


def test_a_kernel_that_crashes_now_and_then_loses_against_the_version_before(pair: Job) -> None:
    pair.trains_on(RAN_WELL_STEPS)
    runs, incidents = pair.running(), len(pair.incidents())
    sent = pair.everstep("update", pair.variant(CRASHES), "j")
    assert sent.code == 0, sent.err
    wait_until(lambda: pair.conditions()[-1] == "rolled back", "the rollback")
    pair.trains_on(150)
    assert pair.rungs(incidents) == ["hot update", "reattempt", "rollback"]
    assert pair.running() == runs
    assert len(pair.incidents()) == incidents + 3, "the update and the first restart were proven"


def test_an_update_keeps_machines_agents_and_launchers_and_loses_no_step(pair: Job) -> None:
    pair.trains_on(30)
    services, before = pair.services(), pair.finished()
    incidents = len(pair.incidents())
    loss = 10.0 + incidents
    new = GOOD.replace("2.5", str(loss))
    sent = pair.everstep("update", pair.variant(new), "j", "--note", "another loss")
    assert sent.code == 0, sent.err
    pair.trains_on(20)
    assert services == pair.services()
    (incident,) = pair.incidents()[incidents:]
    assert incident.planned
    assert (incident.restored or 0) >= before
    assert pair.status().loss == loss
    newest = pair.versions()[-1]
    assert (newest.note, newest.changed) == ("another loss", ("kernels.py",))


def test_steps_that_are_done_again_are_compared_bit_for_bit(pair: Job) -> None:
    """The check of a change that must not change anything: --overlap."""
    pair.trains_on(30)
    loss = pair.status().loss
    same = GOOD.replace("2.5", str(loss)) + f"\n# the same numbers after {pair.finished()} steps\n"
    sent = pair.everstep("update", pair.variant(same), "j", "--overlap", "20")
    assert sent.code == 0, sent.err
    wait_until(lambda: pair.versions()[-1].repeats, "the comparison")
    assert "bit for bit" in pair.versions()[-1].repeats
    incident = pair.incidents()[-1]
    assert incident.planned
    assert (incident.restored or 0) <= incident.furthest - 20


def _does_not_import(job: Job) -> None:
    sent = job.everstep("update", job.variant(NOT_IMPORTABLE), "j")
    assert sent.code == 1
    assert "ModuleNotFoundError: No module named 'no_such_package_at_all'" in sent.err
    assert job.conditions() == ["running", "refused"]


def _is_not_there(job: Job) -> None:
    sent = job.everstep("update", job.everstep.directory / "nowhere", "j")
    assert sent.code == 2
    assert "nowhere" in sent.err


def _is_too_large(job: Job) -> None:
    directory = job.variant(GOOD, "large")
    with (directory / "weights.bin").open("wb") as file:
        file.truncate(10 << 30)
    sent = job.everstep("update", directory, "j")
    assert sent.code == 2
    assert "weights.bin" in sent.err
    assert ".everstepignore" in sent.err


def _is_what_runs(job: Job) -> None:
    sent = job.everstep("update", job.code, "j")
    assert sent.code == 1
    assert "v1" in sent.err


def _nothing_to_roll_back_to(job: Job) -> None:
    sent = job.everstep("rollback", "j")
    assert sent.code == 1
    assert "v1" in sent.err


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with started(tmp_path_factory.mktemp("healthy"), machines=1) as job:
        yield job


@pytest.mark.parametrize(
    "bad",
    [
        _nothing_to_roll_back_to,
        _does_not_import,
        _is_not_there,
        _is_too_large,
        _is_what_runs,
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_training_goes_on(
    healthy: Job, bad: Callable[[Job], None]
) -> None:
    bad(healthy)
    healthy.trains_on(5)
    assert not healthy.incidents()


def test_files_edited_in_place_change_nothing_until_they_are_sent(tmp_path: Path) -> None:
    with started(tmp_path, machines=1) as job:
        job.trains_on(5)
        job.write(job.code, TYPE_ERROR)
        assert job.everstep("inject", "kill-rank", "j").code == 0
        wait_until(job.incidents, "the incident")
        job.trains_on(20)
        assert job.rungs() == ["reattempt"]
        job.write(job.code, GOOD.replace("2.5", "0.5"))
        assert job.everstep("update", job.code, "j").code == 0
        job.trains_on(5)
        assert job.status().loss == 0.5


def test_two_machines_at_once_exhaust_the_pool(tmp_path: Path) -> None:
    """The standby takes one position, and only the other machine is waited for."""
    with started(tmp_path, machines=3, standbys=1) as job:
        job.trains_on(20)
        for name in ("m1", "m2"):
            assert job.everstep("inject", "lose-machine", "j", "--machine", name).code == 0
        wait_until(lambda: job.incidents() and job.runs(), "the restart")
        job.trains_on(20)
        members = job.positions()
        assert members["m0"] == 0, "who stays keeps its position"
        taken = sorted(name for name, position in members.items() if position is not None)
        assert {"m0", "m3"} < set(taken)
        assert len(taken) == 3
        assert all(rung == "evict" for rung in job.rungs())


BAD_ON_M1 = """
import json, os

MACHINE = json.loads(os.environ["EVERSTEP_ATTACH"])["machine"]

def loss_of(step, since):
    if step > 40 and MACHINE == "m1":
        print("RuntimeError: CUDA error: uncorrectable ECC error encountered", flush=True)
        os.abort()
    return 2.5
"""


def test_a_bad_machine_crashes_every_rank_put_on_it_until_it_goes(tmp_path: Path) -> None:
    """Its ranks say what broke: a standby takes its position, and it is tested meanwhile."""
    with started(tmp_path, standbys=1, kernels=BAD_ON_M1) as job:
        wait_until(lambda: job.finished() >= 60, "steps that m1 would not do")
        assert job.rungs() == ["evict"]
        (incident,) = job.incidents()
        assert incident.evicted == ("m1",)
        positions = job.positions()
        assert (positions["m0"], positions["m1"], positions["m2"]) == (0, None, 1)
        (eviction,) = job.evictions()
        assert (eviction.machine, eviction.guilty) == ("m1", None)
        wait_until(lambda: job.evictions()[0].tests, "a test")
