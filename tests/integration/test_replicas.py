"""Real training under DDP that loses a machine: its shard is joined from everybody's slices."""

from __future__ import annotations

import random
import re
from functools import partial
from pathlib import Path

import pytest

from everstep.cluster.cleanup import job_scope
from everstep.commands import offline
from everstep.commands.jobs import result_of, spec_of
from everstep.events import StepBackedUp
from everstep.journal.records import Reader
from everstep.journal.snapshots import RECORDS
from everstep.model import Fault, MachineId, Step
from tests.integration.support import wait_for
from tests.integration.test_survival import Trained, training

MACHINES = 3
FLAGS = (
    *("--local-machines", str(MACHINES)),
    *("--nproc-per-node", "1"),
    *("--standbys", "1"),
    *("--disk-every", "0"),
)
pytestmark = pytest.mark.torch


def safe_step(trained: Trained) -> Step | None:
    """The newest step of which the controller knows that all machines sent their parts."""
    told: dict[Step, int] = {}
    for entry in Reader(trained.paths.journal / RECORDS):
        event = entry.record.event
        if isinstance(event, StepBackedUp) and event.replicated:
            told[event.step] = told.get(event.step, 0) + 1
    return max((step for step, count in told.items() if count == MACHINES), default=None)


def test_a_lost_replica_comes_back_bit_for_bit_from_slices_of_all(tmp_path: Path) -> None:
    with training(tmp_path, "job", *FLAGS, ddp=True) as trained:
        trained.wait_steps(1)
        safe = wait_for("a backup", lambda: safe_step(trained))
        furthest = trained.furthest()
        trained.inject(Fault.LOSE_MACHINE, random.Random(0))
        trained.wait_steps(5)
        trained.stop.touch()
        result = wait_for("the end", lambda: result_of(trained.paths))
        assert (result.outcome, result.exit_code) == ("finished", 0), result
        scope = partial(job_scope, trained.paths.root, spec_of(trained.paths))
        wait_for("the end of all", lambda: not scope().shm)

    (incident,) = offline.incidents(trained.paths).incidents
    assert incident.restored is not None
    assert incident.restored >= safe
    done: dict[int, str] = {}
    again = 0
    for step, outcome in trained.lines():
        again += step in done
        assert done.setdefault(step, outcome) == outcome, f"step {step} came out otherwise"
    assert again >= furthest - incident.restored
    newcomer = trained.paths.machine(MachineId(f"m{MACHINES}")).log("agent").read_text()
    fetched = re.search(rf"fetched 1 shards of step {incident.restored}, .* from (.*) in", newcomer)
    assert fetched is not None, newcomer
    assert len(fetched[1].split(", ")) == MACHINES - 1
    assert "what ranks hold alike goes once" in newcomer
