"""Updates and rollbacks of whole jobs: the command, real processes, real crashes.

What restarts cost is for bench/recovery.py to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.command import wait_until
from tests.integration.versioned import GOOD, Job, started

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
