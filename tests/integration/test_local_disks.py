"""Real training whose machines all lose their memory at once: their own disks are enough."""

from __future__ import annotations

import shutil
import signal
from functools import partial
from pathlib import Path

import pytest

from everstep.checkpoint import local_disk
from everstep.cluster.cleanup import job_scope
from everstep.commands import offline
from everstep.commands.jobs import result_of, spec_of
from everstep.model import MachineId, Step
from everstep.paths import local_disk_dir, shm_dir
from everstep.processes import everyone, maps_below, read_pid_file, send_signal
from tests.integration.support import wait_for
from tests.integration.test_survival import Trained, training

pytestmark = pytest.mark.torch
MACHINES = (MachineId("m0"), MachineId("m1"))


def own_disk(trained: Trained, machine: MachineId) -> Path:
    spec = spec_of(trained.paths)
    return local_disk_dir(spec.checkpoint.local_directory, spec, machine)


def on_all_disks(trained: Trained) -> list[Step]:
    """Steps that every machine has its shards of."""
    steps = [{c.step for c in local_disk.inventory(own_disk(trained, m))} for m in MACHINES]
    return sorted(steps[0] & steps[1])


def reboot(trained: Trained, machine: MachineId) -> None:
    """What a quick reboot does: processes and memory are gone, then the agent is back."""
    spec = spec_of(trained.paths)
    shm = shm_dir(spec.job, spec.uid, machine)
    ranks = [process for process in everyone() if maps_below(process.pid, shm)]
    services = [trained.paths.machine(machine).pid_file(name) for name in ("agent", "launcher")]
    for process in [*map(read_pid_file, services), *ranks]:
        if process is not None:
            send_signal(process, signal.SIGKILL)
    shutil.rmtree(shm)


def test_a_job_that_loses_all_memory_goes_on_from_its_machines_own_disks(tmp_path: Path) -> None:
    flags = ("--local-machines", "2", "--nproc-per-node", "2", "--no-backup", "--disk-every", "0")
    local = ("--local-checkpoint-dir", str(tmp_path / "nvme"), "--local-disk-every", "30")
    with training(tmp_path, "job", *flags, *local) as trained:
        wait_for("a copy", lambda: on_all_disks(trained))
        for machine in MACHINES:
            reboot(trained, machine)
        lines = len(trained.lines())
        wait_for("steps done again", lambda: len(trained.lines()) > lines + 50)
        trained.stop.touch()
        result = wait_for("the end", lambda: result_of(trained.paths))
        assert (result.outcome, result.exit_code) == ("finished", 0), result
        scope = partial(job_scope, trained.paths.root, spec_of(trained.paths))
        wait_for("the end of all", lambda: not scope().shm)
        wait_for("the end of copies", lambda: not list((tmp_path / "nvme").iterdir()))

    (incident,) = offline.incidents(trained.paths).incidents
    assert incident.restored is not None
    assert incident.restored > 0
    done: dict[int, str] = {}
    again = 0
    for step, outcome in trained.lines():
        again += step in done
        assert done.setdefault(step, outcome) == outcome, f"step {step} came out otherwise"
    assert again > 0
