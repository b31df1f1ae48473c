"""`everstep update`, `rollback` and `versions`: what is sent, what is told, how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.actions import Rung
from everstep.code.manifest import Manifest
from everstep.commands.follow import LEFT
from everstep.controller.accepting import Asked
from everstep.controller.views import RungView
from everstep.core.ettr import Owner
from everstep.core.history import Condition
from everstep.core.state import Phase
from everstep.model import (
    CodeOrigin,
    Generation,
    MachineId,
    Step,
)
from tests.commands.code_controller import FIRST, RAN, CodeController, Scene
from tests.commands.fake_controller import (
    SPENT,
    ended_view,
    incident_view,
    job_in,
    status_view,
)
from tests.commands.test_cli import Done, Everstep
from tests.controller.support import controller as real_controller
from tests.controller.test_code_api import job_with_code

NEW = {"train.py": "import model\n", "model.py": "SIZE = 2\n"}


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[CodeController]:
    made = CodeController(tmp_path)
    made.come()
    yield made
    made.go()


@pytest.fixture
def everstep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Everstep:
    return Everstep(tmp_path, capsys, monkeypatch)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A directory with new code, below a directory of jobs: those are no part of it."""
    return written(tmp_path / "new", NEW)


def written(directory: Path, files: dict[str, str]) -> Path:
    directory.mkdir()
    for name, text in files.items():
        (directory / name).write_text(text)
    return directory


STOPS = status_view(generation=Generation(2), phase=Phase.STOPPING, furthest=Step(120))
TRAINS = status_view(
    generation=Generation(2), restored=Step(120), finished_by_all=Step(121), furthest=Step(121)
)
RUNS = {"condition": Condition.RUNNING, "held": 5, "tried": True, "runs": (RAN,)}


def test_every_stage_of_an_update_is_one_line(
    everstep: Everstep, controller: CodeController, code: Path
) -> None:
    controller.scenes = [
        Scene(held=1),
        Scene(held=5),
        Scene(held=5, tried=True, elsewhere=("/opt/x.py",)),
        Scene(STOPS, **RUNS),
        Scene(TRAINS, **RUNS),
    ]
    rung = RungView(
        rung=Rung.HOT_UPDATE,
        generation=Generation(2),
        failure="hot update",
        why="",
        at=0.0,
        action="4.0",
    )
    spent = SPENT | {Owner.RESTARTING: 0.75, Owner.WAITING: 0.15, Owner.TRAINING: 9.0}
    controller.incidents = (incident_view(planned=True, rungs=(rung,), seconds=spent),)
    done = everstep("update", str(code), "--note", "larger")
    assert done.out.splitlines() == [
        "2 files, 22 bytes, sent to the controller",
        "v2 changes 1 file: model.py",
        "it is based on v1, which runs",
        "held by 5 of 5 machines",
        "imported on m4 in 1.3 s",
        "not versioned, since it lies outside of the source roots: /opt/x.py",
        "generation 1 stops at step 120",
        "v2 runs: training again at step 121 after 0.9 s",
    ]
    assert done.code == 0
    assert controller.puts == 1
    asked = controller.asked[0]
    assert (asked.urgent, asked.note, asked.given) == (True, "larger", (0,))
    assert asked.origin.path == str(code)
    assert [entry.path for entry in controller.store.manifest(asked.version).roots[0]] == sorted(
        NEW
    )


def test_what_the_controller_has_is_not_sent(
    everstep: Everstep, controller: CodeController, code: Path
) -> None:
    assert everstep("update", str(code), "--no-wait").code == 0
    done = everstep("update", str(code), "--no-wait", "--json")
    assert controller.puts == 1
    said = json.loads(done.out)
    assert said["accepted"]["name"] == "v2"
    assert said["version"] is None
    assert "the controller has them already" in everstep("update", str(code), "--no-wait").out


def test_a_lazy_update_is_left_when_it_is_ready(
    everstep: Everstep, controller: CodeController, code: Path
) -> None:
    ready: dict[str, Any] = {
        "condition": Condition.READY,
        "urgent": False,
        "due_at": 1_700_000_000.0,
        "held": 5,
    }
    controller.scenes = [Scene(urgent=False), Scene(**ready)]
    done = everstep("update", str(code), "--lazy", "--within", "30m")
    assert done.code == 0
    assert "v2 is ready: the next restart brings it, or the end of its window" in done.out
    assert (controller.asked[0].urgent, controller.asked[0].within_s) == (False, 1800.0)


@pytest.mark.parametrize(
    ("scene", "said"),
    [
        (
            Scene(condition=Condition.REFUSED, why="it does not import", detail="Traceback: x\n"),
            "v2 is refused: it does not import\nTraceback: x\n",
        ),
        (
            Scene(
                condition=Condition.ROLLED_BACK,
                why="back to v1",
                failure="TypeError",
                runs=(RAN,),
            ),
            "v2 is rolled back: TypeError; back to v1\n",
        ),
        (Scene(ended_view(1)), "the job is over (failed): so it was\n"),
    ],
)
def test_an_update_that_will_never_run_ends_with_1(
    everstep: Everstep, controller: CodeController, code: Path, scene: Scene, said: str
) -> None:
    controller.scenes = [Scene(), scene]
    done = everstep("update", str(code))
    assert (done.code, done.err) == (1, f"everstep: {said}")
    controller.scenes = [scene]
    done = everstep("update", str(code), "--json")
    assert (done.code, done.err) == (1, f"everstep: {said}")
    assert json.loads(done.out)["accepted"]["name"] == "v2"


def test_a_job_that_goes_with_its_controller_is_not_waited_for(
    everstep: Everstep, controller: CodeController, code: Path
) -> None:
    controller.scenes = [Scene()]

    def end() -> None:
        controller.after = lambda: None
        controller.end(1, "so it was")
        controller.later(controller.go)

    controller.after = end
    done = everstep("update", str(code))
    assert (done.code, done.err) == (1, "everstep: the job is over (failed): so it was\n")


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, LEFT), (signal.SIGHUP, 128 + signal.SIGHUP)]
)
def test_who_is_ended_while_code_is_sent_asks_for_nothing_and_leaves_nothing(
    everstep: Everstep,
    controller: CodeController,
    code: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    exit_code: int,
) -> None:
    made = code.parent / "temporary"
    made.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(made))
    controller.before_taking = lambda: os.kill(os.getpid(), number)
    done = everstep("update", str(code))
    assert done.code == exit_code
    said = "everstep: Ctrl-C before the update was asked for: nothing was changed.\n"
    assert (said in done.err) == (number is signal.SIGINT)
    assert not controller.asked
    assert not list(made.iterdir())


def test_an_update_in_a_newer_one_is_done(
    everstep: Everstep, controller: CodeController, code: Path
) -> None:
    controller.scenes = [Scene(condition=Condition.INCLUDED)]
    done = everstep("update", str(code))
    assert done.code == 0
    assert "in a newer version" in done.out


def test_a_machine_that_cannot_get_it_is_named_once(
    everstep: Everstep, controller: CodeController, code: Path
) -> None:
    failing = {MachineId("m3"): "no space left"}
    controller.scenes = [
        Scene(not_held=failing),
        Scene(not_held=failing),
        Scene(condition=Condition.INCLUDED, untold=("timed out",)),
    ]
    done = everstep("update", str(code))
    assert done.out.count("m3 could not get it, and tries again: no space left") == 1
    assert "nothing is known of its import, which is tried again: timed out" in done.out


def test_ctrl_c_leaves_the_update_going(
    everstep: Everstep, controller: CodeController, code: Path
) -> None:
    controller.scenes = [Scene()]
    controller.after = lambda: os.kill(os.getpid(), signal.SIGINT)
    done = everstep("update", str(code))
    assert done.code == LEFT
    assert "the update goes on" in done.out


def test_a_controller_that_dies_is_waited_for(
    everstep: Everstep, controller: CodeController, code: Path
) -> None:
    controller.scenes = [Scene()]

    def die_and_come_back() -> None:
        controller.after = lambda: None
        controller.scenes = [Scene(condition=Condition.INCLUDED)]
        controller.later(controller.go, lambda: controller.come(term=2))

    controller.after = die_and_come_back
    assert everstep("update", str(code)).code == 0


# --- what is refused -----------------------------------------------------------------------------


def test_what_the_controller_declines_is_its_sentence(
    everstep: Everstep, controller: CodeController, code: Path
) -> None:
    controller.refusal = "model.py was changed by v2 of ben as well"
    done = everstep("update", str(code))
    assert (done.code, done.err) == (1, "everstep: model.py was changed by v2 of ben as well\n")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("nowhere", "nowhere is not a directory, and neither"),
        ("{new} --urgent --lazy", "An update is urgent or lazy"),
        ("{new} --within 3h", "--within is for --lazy"),
        ("{new} --lazy --within soon", "--within soon is no time"),
        ("{new} --root 1={new}", "it has one source root"),
        ("{new} nope", "There is no job nope"),
        ("{empty}", "is empty: there is no code in it"),
        ("{large}", "large.bin"),
    ],
)
def test_what_cannot_be_sent_is_said_and_nothing_is_sent(
    everstep: Everstep,
    controller: CodeController,
    places: dict[str, Path],
    words: str,
    sentence: str,
) -> None:
    done = everstep("update", *words.format(**places).split())
    assert done.code == 2
    assert sentence in done.err
    assert controller.puts == 0
    assert not controller.asked


@pytest.fixture
def places(code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Directories to send; the user is in none of them, and in no repository."""
    monkeypatch.chdir("/")
    large = written(tmp_path / "large", {"large.bin": ""})
    os.truncate(large / "large.bin", 10 << 30)
    return {"new": code, "empty": written(tmp_path / "empty", {}), "large": large}


def test_a_job_without_versions_says_why(
    everstep: Everstep, controller: CodeController, code: Path
) -> None:
    controller.why_none, controller.roots = "it is no Python program", ()
    done = everstep("update", str(code))
    assert done.code == 2
    assert "The code of job j is not versioned: it is no Python program" in done.err


def test_a_job_that_is_over_gets_no_code(
    everstep: Everstep, controller: CodeController, code: Path
) -> None:
    controller.end()
    for words in (["update", str(code)], ["rollback"]):
        done = everstep(*words)
        assert done.code == 2
        assert "Job j is over" in done.err


def test_nobody_answers(everstep: Everstep, tmp_path: Path, code: Path) -> None:
    job_in(tmp_path)
    done = everstep("update", str(code))
    assert done.code == 1
    assert "has not said where it listens" in done.err


# --- dry run -------------------------------------------------------------------------------------


def test_a_dry_run_sends_no_code_and_says_what_would_be(
    everstep: Everstep, controller: CodeController, code: Path
) -> None:
    done = everstep("update", str(code), "--dry-run")
    assert done.code == 0
    assert done.out.splitlines() == [
        "v2 would change, against what runs, 1 file: model.py",
        "it is based on v1, which runs",
    ]
    assert controller.puts == 0
    assert controller.asked[0].dry_run
    assert controller.asked[0].manifest is not None
    controller.objections = ("nothing changes", "it is exactly v2")
    done = everstep("update", str(code), "--dry-run")
    assert done.code == 1
    assert "would be refused: nothing changes\nwould be refused: it is exactly v2\n" in done.out
    assert json.loads(everstep("update", str(code), "--dry-run", "--json").out)["accepted"]


# --- git and several roots -----------------------------------------------------------------------


def git(directory: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    done = subprocess.run(
        ["git", *identity, *words], cwd=directory, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def committed(directory: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (directory / name).write_text(text)
    git(directory, "add", ".")
    git(directory, "commit", "-qm", "change")
    return git(directory, "rev-parse", "HEAD")


def test_a_commit_is_sent_with_those_of_the_jobs_that_it_contains(
    everstep: Everstep, controller: CodeController, tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    git(repository, "init", "-q")
    first = committed(repository, {"train.py": "1"})
    second = committed(repository, {"train.py": "2"})
    (repository / "train.py").write_text("not committed")
    controller.roots = (str(repository),)
    controller.first = msgspec.structs.replace(FIRST, origin=CodeOrigin(kind="git", commit=first))
    assert everstep("update", "main", "--no-wait").code == 0
    asked = controller.asked[-1]
    assert (asked.origin.kind, asked.origin.commit, asked.ancestors) == ("git", second, (first,))
    assert asked.source == f"git {second[:12]} of {repository}"
    roots = controller.store.roots(asked.version)
    assert (roots[0] / "train.py").read_text() == "2"
    # A directory is a commit, too, and what was changed since.
    assert everstep("update", str(repository), "--no-wait").code == 0
    asked = controller.asked[-1]
    assert (asked.origin.kind, asked.origin.commit, asked.ancestors) == ("dir", second, (first,))
    done = everstep("update", "no-such-branch")
    assert done.code == 2
    assert "no-such-branch" in done.err


def test_further_source_roots_are_sent_by_number(
    everstep: Everstep, controller: CodeController, code: Path, tmp_path: Path
) -> None:
    library = written(tmp_path / "library", {"lib.py": "x"})
    controller.roots = ("/home/anna/gpt", "/home/anna/lib", "/home/anna/more")
    words = ["update", str(code), "--root", f"2={library}", "--no-wait"]
    assert everstep(*words).code == 0
    asked = controller.asked[0]
    assert asked.given == (0, 2)
    sizes = [len(root) for root in manifest_of(controller, asked).roots]
    assert sizes == [2, 0, 1]
    assert "--root 3=x is no NUMBER=DIR" in everstep("update", str(code), "--root", "3=x").err


def manifest_of(controller: CodeController, asked: Asked) -> Manifest:
    return controller.store.manifest(asked.version)


# --- rollback and versions -----------------------------------------------------------------------


def test_a_rollback_is_followed_until_it_trains(
    everstep: Everstep, controller: CodeController
) -> None:
    back: dict[str, Any] = {"condition": Condition.ROLLED_BACK, "held": 5, "tried": True}
    controller.scenes = [
        Scene(**back),
        Scene(STOPS, condition=Condition.RUNNING, held=5),
        Scene(TRAINS, condition=Condition.RUNNING, held=5),
    ]
    done = everstep("rollback", "--to", "v1", "--note", "slow")
    assert done.code == 0
    assert done.out.splitlines() == [
        "v1 takes the place of v2",
        "held by 5 of 5 machines",
        "generation 1 stops at step 120",
        "v1 runs: training again at step 121",
    ]
    assert controller.posted[0][1]["to"] == "v1"
    assert everstep("rollback", "--dry-run").out == "v1 would take the place of v2\n"


def test_the_table_of_versions_says_who_when_and_what_became_of_them(
    everstep: Everstep, controller: CodeController
) -> None:
    controller.first = msgspec.structs.replace(
        FIRST, repeats="losses came out as before", elsewhere=("/opt/x.py",)
    )
    lines = everstep("versions").out.splitlines()
    assert lines[0].split()[:5] == ["v", "condition", "who", "when", "source"]
    table = " ".join(" ".join(lines).split())
    assert "v1 running *" in table
    assert "2 h, 120 steps" in table
    assert "login1 3 files 2 h" in table
    assert "v1: losses came out as before" in table
    assert "v1: not versioned, since it lies elsewhere: /opt/x.py" in table
    assert json.loads(everstep("versions", "--json").out)["versions"][0]["name"] == "v1"


def shows(done: Done) -> str:
    assert done.code == 0, done.err
    return " ".join(done.out.split())


def test_a_real_controller_takes_what_the_command_sends(
    everstep: Everstep, tmp_path: Path, code: Path
) -> None:
    paths = job_with_code(tmp_path, NEW | {"model.py": "SIZE = 1\n"})
    name = paths.root.name
    with real_controller(paths) as running:
        running.endpoint()
        assert "model.py" in everstep("update", str(code), name, "--dry-run").out
        done = everstep("update", str(code), name, "--no-wait", "--lazy", "--note", "larger")
        assert done.code == 0, done.err
        assert "v2 changes 1 file: model.py" in done.out
        done = everstep("update", str(code), name, "--no-wait")
        assert (done.code, done.err) == (
            1,
            "everstep: nothing changes: it is the same as v2, which waits\n",
        )
        assert "nothing to roll back to" in everstep("rollback", name).err
        assert "v2 pending" in shows(everstep("versions", name))
        assert "waiting: v2 (lazy, " in shows(everstep("status", name))
        assert "UpdateRequested" in shows(everstep("why", "v2", name))
    # Without a controller, the journal says the same.
    assert "v2 pending" in shows(everstep("versions", name))
    assert "larger" in shows(everstep("versions", name))
