"""Real training that loses a machine and has nothing on disk: its peer's memory is enough."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest

from everstep.checkpoint.kept import Kept
from everstep.cluster.cleanup import job_scope
from everstep.commands import offline
from everstep.commands.jobs import result_of, spec_of
from everstep.model import Fault, MachineId, Step
from everstep.paths import shm_dir
from tests.integration.support import wait_for
from tests.integration.test_survival import Trained, training

pytestmark = pytest.mark.torch


def kept_by_both(trained: Trained) -> Step | None:
    """The newest step of which both machines keep the other one's shards."""
    spec = spec_of(trained.paths)
    steps = [
        {copy.step for copy in Kept(shm_dir(spec.job, spec.uid, MachineId(name))).inventory()}
        for name in ("m0", "m1")
    ]
    return max(steps[0] & steps[1], default=None)


def test_a_lost_machine_costs_no_more_than_the_steps_since_the_last_backup(tmp_path: Path) -> None:
    flags = (
        "--local-machines",
        "2",
        "--nproc-per-node",
        "2",
        "--standbys",
        "1",
        "--disk-every",
        "0",
    )
    with training(tmp_path, "job", *flags) as trained:
        safe = wait_for("a backup", lambda: kept_by_both(trained))
        trained.wait_steps(20)
        furthest = trained.furthest()
        trained.inject(Fault.LOSE_MACHINE, random.Random(0))
        lines = trained.lines()
        wait_for("steps done again", lambda: len(trained.lines()) > len(lines) + 50)
        trained.stop.touch()
        wait_for("the end", lambda: result_of(trained.paths))
        result = result_of(trained.paths)
        assert result is not None
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
    log = trained.paths.machine(MachineId("m2")).log("agent").read_text()
    assert f"fetched 2 shards of step {incident.restored}" in log
