"""Real training under random faults of every kind: bit for bit what it would have been without.

A second job trains the same at the same time, on one machine, and nobody disturbs it.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from everstep.cluster.cleanup import clean_job, job_scope
from everstep.commands import offline
from everstep.commands.client import Away, Client, Declined
from everstep.commands.jobs import result_of, spec_of
from everstep.controller.views import MachineView
from everstep.events import FaultInjected
from everstep.journal.records import Reader
from everstep.journal.snapshots import RECORDS
from everstep.model import Fault, JobId, MachineId, Rank
from everstep.paths import JobPaths
from tests.integration.support import wait_for

SURVIVOR = Path(__file__).with_name("survivor.py")
RANKS = 4
SEED = int(os.environ.get("EVERSTEP_TEST_SEED", "20"))
pytestmark = pytest.mark.torch


class Trained:
    """One job that trains survivor.py or a script alike, as its user would start it."""

    def __init__(
        self, directory: Path, name: str, *flags: str, script: Path = SURVIVOR, ddp: bool = False
    ) -> None:
        self.paths = JobPaths(directory / "jobs", JobId(name))
        self.log = directory / f"{name}.log"
        self.stop = directory / "stop"
        command = [str(script), "--losses", str(self.log), "--stop", str(self.stop)]
        command += ["--ddp"] if ddp else []
        self._run = ("run", "--job", name, "--detach", *flags, *command)

    def start(self) -> None:
        state = ("--state-dir", str(self.paths.root.parent))
        command = [sys.executable, "-m", "everstep", self._run[0], *state, *self._run[1:]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr

    def lines(self) -> list[tuple[int, str]]:
        """Step, and what it came to; as often as it was done."""
        text = self.log.read_text() if self.log.exists() else ""
        whole = text[: text.rfind("\n") + 1].splitlines()
        pairs = (line.split(" ", 1) for line in whole)
        return [(int(step), outcome) for step, outcome in pairs]

    def furthest(self) -> int:
        return max((step for step, _ in self.lines()), default=-1)

    def wait_steps(self, count: int) -> None:
        """Until this many steps are done that were not done before."""
        goal = self.furthest() + count
        wait_for(f"step {goal} in {self.paths.root}", lambda: self.furthest() >= goal)

    def inject(self, fault: Fault, dice: random.Random) -> None:
        """On a random rank or machine, as soon as there is a controller to ask."""

        def asked() -> bool:
            try:
                with Client(self.paths) as client:
                    members = [m for m in client.status().machines if m.condition == "member"]
                    if members:
                        client.inject(fault, *aim(fault, members, dice))
                    return bool(members)
            except (Away, Declined):  # no controller, or one without that machine's agent
                return False

        wait_for("a controller that has machines", asked)

    def injected(self) -> set[Fault]:
        events = (entry.record.event for entry in Reader(self.paths.journal / RECORDS))
        return {event.fault for event in events if isinstance(event, FaultInjected)}


def aim(
    fault: Fault, members: list[MachineView], dice: random.Random
) -> tuple[Rank | None, MachineId | None]:
    """Whom it hits."""
    if fault is Fault.KILL_RANK:
        return Rank(dice.randrange(RANKS)), None
    if fault is Fault.KILL_CONTROLLER:
        return None, None
    return None, dice.choice(members).machine


@contextmanager
def training(
    directory: Path, name: str, *flags: str, script: Path = SURVIVOR, ddp: bool = False
) -> Iterator[Trained]:
    """A job that is ended with the test; its logs stay where tmp_path is kept."""
    trained = Trained(directory, name, *flags, script=script, ddp=ddp)
    trained.start()
    try:
        yield trained
    finally:
        clean_job(trained.paths.root)


def test_training_under_faults_of_every_kind_keeps_every_bit(tmp_path: Path) -> None:
    dice = random.Random(SEED)
    faults = list(Fault)
    dice.shuffle(faults)
    with (
        training(tmp_path, "calm", "--local-machines", "1", "--nproc-per-node", "4") as calm,
        training(
            tmp_path,
            "stormy",
            *("--local-machines", "2", "--nproc-per-node", "2", "--standbys", "1"),
            *("--disk-every", "20"),
        ) as stormy,
    ):
        for fault in faults:
            stormy.wait_steps(dice.randint(1, 40))
            stormy.inject(fault, dice)
        wait_for("the last fault", lambda: stormy.injected() == set(Fault))
        stormy.wait_steps(20)
        calm.stop.touch()
        wait_for("both ends", lambda: result_of(calm.paths) and result_of(stormy.paths))
        result = result_of(stormy.paths)
        assert result is not None
        assert (result.outcome, result.exit_code) == ("finished", 0), f"{SEED=} {faults} {result}"
        scope = partial(job_scope, stormy.paths.root, spec_of(stormy.paths))
        wait_for("the end of all", lambda: not scope().shm)

    undisturbed = dict(calm.lines())
    assert len(undisturbed) == len(calm.lines())
    common = [(step, outcome) for step, outcome in stormy.lines() if step in undisturbed]
    assert len({step for step, _ in common}) > 50
    wrong = [(step, outcome) for step, outcome in common if undisturbed[step] != outcome]
    assert not wrong, f"{SEED=} {faults}"
    steps = {step for step, _ in stormy.lines()}
    assert steps == set(range(len(steps)))
    incidents = offline.incidents(stormy.paths).incidents
    assert incidents
    assert all(incident.closed_at is not None for incident in incidents)
