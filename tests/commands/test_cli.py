"""The command as a user meets it: a mistake is one sentence and an exit code; JSON on demand."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from everstep.cli import main
from everstep.controller.gate import findings_token
from everstep.files import read_json, write_atomically
from everstep.paths import Endpoint, JobPaths, JobResult
from tests.commands.fake_controller import TOKEN, incident_view, job_in, listening


class Done(NamedTuple):
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


class Everstep:
    """Calls the command in this process."""

    def __init__(
        self,
        state: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.state = state
        self._capsys = capsys
        self._patch = monkeypatch

    def __call__(self, *words: str) -> Done:
        self._patch.setattr(sys, "argv", ["everstep", *words])
        self._patch.setenv("EVERSTEP_HOME", str(self.state))
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        assert isinstance(code, int)
        return Done(code, *self._capsys.readouterr())


@pytest.fixture
def everstep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Everstep:
    return Everstep(tmp_path, capsys, monkeypatch)


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ("run", 2, "No script was given"),
        ("run missing.py", 2, "There is no script"),
        ("run --nnodes 2:4 t.py", 2, "--nnodes 2:4 asks for a job that changes its size"),
        ("run --no-such-flag t.py", 2, "Unrecognized arguments: --no-such-flag"),
        ("status", 2, "There is no job in"),
        ("status nope", 2, "There is no job nope in"),
        ("attach", 2, "There is no job in"),
        ("stop nope", 2, "There is no job nope in"),
        ("inject kill-rank nope", 2, "There is no job nope in"),
        ("why i1 nope", 2, "There is no job nope in"),
        ("controller nope", 2, "There is no job nope in"),
        ("agent nope", 2, "There is no job nope in"),
        ("clean", 2, "Name a job, or say --all"),
        ("clean --all j", 2, "Name a job, or say --all"),
        ("clean nope", 2, "There is no job nope in"),
    ],
)
def test_a_mistake_is_one_sentence_on_standard_error(
    everstep: Everstep, words: str, code: int, sentence: str
) -> None:
    done = everstep(*words.split())
    assert done.code == code
    assert done.out == ""
    assert done.err.startswith(f"everstep: {sentence}")
    assert done.err.count("\n") == 1


def test_a_variable_of_torchrun_is_refused(
    everstep: Everstep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_NNODES", "2")
    done = everstep("run", "t.py")
    assert done.code == 2
    assert done.err.startswith("everstep: PET_NNODES is set, and everstep takes flags from")


def test_an_unknown_fault_lists_those_that_there_are(everstep: Everstep) -> None:
    done = everstep("inject", "earthquake")
    assert done.code == 2
    assert "kill-rank" in done.err
    assert "Traceback" not in done.err


def test_a_job_that_is_over_takes_no_orders(everstep: Everstep) -> None:
    paths = job_in(everstep.state)
    write_atomically(paths.result, JobResult(outcome="finished", exit_code=0, why="it was done"))
    assert "Job j is over already (finished: it was done)" in everstep("stop").err
    assert "there is nothing to control" in everstep("controller").err
    assert "there is nothing to join" in everstep("agent").err


def test_a_job_without_controller_and_journal_says_where_to_look(everstep: Everstep) -> None:
    paths = job_in(everstep.state)
    for words in (["status"], ["incidents"], ["why", "i1"]):
        done = everstep(*words)
        assert done.code == 1
        assert done.err.count("\n") == 1
        assert str(paths.root) in done.err
    assert "has not said where it listens" in everstep("stop").err


def test_version_and_json(everstep: Everstep) -> None:
    assert everstep("version").out.startswith("everstep 0.")
    assert set(json.loads(everstep("version", "--json").out)) == {"everstep", "python"}


def test_a_dry_run_shows_the_plan_and_starts_nothing(everstep: Everstep, tmp_path: Path) -> None:
    script = tmp_path / "t.py"
    script.touch()
    done = everstep("run", "--local-machines", "3", "--dry-run", str(script))
    assert done.code == 0
    assert "3 stand-in machines, m0 to m2" in done.out
    as_json = json.loads(everstep("run", "--dry-run", "--json", str(script)).out)
    assert as_json["spec"]["nnodes"] == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.py"]


def test_clean_of_a_job_that_left_nothing_says_so_and_forgets_on_demand(
    everstep: Everstep,
) -> None:
    paths = job_in(everstep.state)
    assert everstep("clean", "j").out == "job j: nothing was left\n"
    planned = json.loads(everstep("clean", "--all", "--forget", "--dry-run", "--json").out)
    assert [each["directories"] for each in planned] == [[str(paths.root)]]
    assert paths.root.exists()
    assert f"job j: removed {paths.root}" in everstep("clean", "--all", "--forget").out
    assert not paths.root.exists()
    assert everstep("clean", "--all").out == "there is no job to clean\n"


def test_a_live_controller_answers_status_and_incidents(everstep: Everstep) -> None:
    with listening(job_in(everstep.state)) as fake:
        fake.incidents = (incident_view(closed_at=9.0, outcome="recovered", restored=7),)
        assert "step 7 | 100 ms per step | loss 2.5000" in everstep("status", "j").out
        assert "backup placement is off: no layout" in everstep("status", "j").out
        told = json.loads(everstep("status", "--json").out)
        assert told["finished_by_all"] == 7
        assert told["mechanisms"][0]["on"] is False
        shown = everstep("incidents").out
        assert "rank 3 died of signal 9" in shown
        assert "recovered; restored step 7" in shown
        assert json.loads(everstep("incidents", "--json").out)["incidents"][0]["incident"] == "i1"


def test_the_token_of_monitors_is_shown_to_who_may_read_that_of_the_job(
    everstep: Everstep,
) -> None:
    paths = job_in(everstep.state)
    assert everstep("token").out == f"{TOKEN}\n"
    assert everstep("token", "--findings").out == f"{findings_token(TOKEN)}\n"
    assert json.loads(everstep("token", "--json").out) == {"token": TOKEN, "url": ""}
    with listening(paths):
        told = json.loads(everstep("token", "--findings", "--json").out)
        assert told["token"] == findings_token(TOKEN)
        assert told["url"] == read_json(paths.endpoint, Endpoint).url
    paths.token.unlink()
    refused = everstep("token", "--findings")
    assert refused.code == 1
    assert "run the command as the user who started the job" in refused.err


def test_orders_reach_the_controller(everstep: Everstep) -> None:
    with listening(job_in(everstep.state)) as fake:
        assert everstep("inject", "kill-rank", "--rank", "3").code == 0
        assert everstep("inject", "lose-machine", "j", "--machine", "m1", "--json").code == 0
        assert everstep("stop").code == 0
        assert fake.posted == [
            ("/v1/inject", {"fault": "kill-rank", "rank": 3, "machine": None}),
            ("/v1/inject", {"fault": "lose-machine", "rank": None, "machine": "m1"}),
            ("/v1/stop", {"by": "everstep stop"}),
        ]


def test_without_a_name_the_newest_job_is_meant(everstep: Everstep) -> None:
    older, newer = job_in(everstep.state, "older"), job_in(everstep.state, "newer")
    os_time = older.spec.stat().st_mtime
    touch(older, os_time - 100)
    assert str(newer.root) in everstep("status").err
    touch(older, os_time + 100)
    assert str(older.root) in everstep("status").err


def touch(paths: JobPaths, at: float) -> None:
    os.utime(paths.spec, (at, at))
