"""Whole jobs, broken on purpose: each promise of the first step, end to end, on one host."""

from __future__ import annotations

import signal
from pathlib import Path

from everstep.commands import offline
from everstep.core.state import Phase
from everstep.model import MachineId
from everstep.paths import shm_dir
from everstep.processes import Process, send_signal
from tests.integration.support import Job, job, wait_for


def kill(process: Process | None) -> None:
    assert process is not None
    assert send_signal(process, signal.SIGKILL)


def advances(running: Job) -> int:
    """Wait until steps are finished that were not before; returns the generation."""
    now = running.wait(lambda status: status.phase is Phase.RUNNING, "running")
    later = running.wait(
        lambda status: (
            status.finished_by_all > now.finished_by_all or status.generation > now.generation
        ),
        "another step",
    )
    return later.generation


def test_a_job_survives_every_kind_of_death_and_ends_well(tmp_path: Path) -> None:
    with job(tmp_path, standbys=1) as running:
        running.start()
        assert advances(running) == 1

        # The death of agent, launcher and controller costs no step.
        kill(running.service("m0", "agent"))
        wait_for("its successor", lambda: running.machine("m0").condition == "member")
        kill(running.service("m1", "launcher"))
        kill(running.controller())
        back = running.wait(lambda status: status.term == 2, "the next controller")
        assert back.generation == 1
        running.wait(
            lambda s: all(m.condition in ("member", "standby") for m in s.machines), "all back"
        )
        assert advances(running) == 1
        assert running.incidents().incidents == ()

        # The death of a rank costs a restart.
        running.order("/v1/inject", fault="kill-rank", rank=1)
        running.wait(lambda status: status.generation == 2, "a restart")
        assert advances(running) == 2
        running.wait(lambda status: status.incident is None, "the proof of recovery")

        # The loss of a machine costs a restart on the standby, and another one is started.
        running.order("/v1/inject", fault="lose-machine", machine="m0")
        running.wait(lambda status: status.generation == 3, "a restart")
        assert advances(running) == 3
        assert running.machine("m0").condition == "evicted"
        assert running.machine("m2").node_rank == 0
        running.wait(lambda status: len(status.machines) == 4, "a fresh standby")
        assert running.machine("m3").condition == "standby"

        (tmp_path / "finish").touch()
        assert running.result().outcome == "finished"
        assert running.result().exit_code == 0
        # From the journal: the controller is gone.
        told = offline.incidents(running.paths).incidents
        assert [incident.symptom.partition(":")[0] for incident in told] == [
            "rank 1 on m1 ended with signal 9",
            "machine m0 is lost",
        ]
        wait_for("the end of all", running.nothing_is_left)
    assert running.cleaned.processes == ()


def test_a_stopped_job_leaves_nothing(tmp_path: Path) -> None:
    with job(tmp_path, nnodes=1) as running:
        running.start()
        running.order("/v1/stop", by="the test")
        result = running.result()
        assert (result.outcome, result.exit_code) == ("stopped", 130)
        wait_for("the end of all", running.nothing_is_left)
        assert not shm_dir(running.spec.job, running.spec.uid, MachineId("m0")).exists()
    assert running.cleaned.processes == ()
