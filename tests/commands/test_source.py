"""The code at submission: which roots, kept as the first version, and never a reason to fail."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from everstep.code import snapshot as snapshots
from everstep.code.snapshot import lies_there
from everstep.code.store import CodeStore
from everstep.commands import jobs, run, source
from everstep.commands.flags import parse
from everstep.commands.host import facts_of_this_host
from everstep.commands.launch import run as run_command
from everstep.commands.plan import HostFacts, Leads, Plan, code_of, plan
from everstep.commands.presses import Presses
from everstep.commands.run import Waiting, described, start
from everstep.model import NO_VERSION, CodeSpec, UserError
from everstep.paths import JobPaths
from everstep.processes import identify
from tests.code.trees import TREE, as_nobody, contents, plant, targets

FACTS: dict[str, Any] = {"state_dir": "/s", "working_dir": "/w", "cpus": 1, "gpus": 0, "uid": "0"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with code in it; keepers are not started."""
    root = plant(tmp_path / "gpt", TREE)
    monkeypatch.chdir(root)
    monkeypatch.setattr(run, "start_keeper", lambda *_: identify(os.getppid()))
    return root


def made(words: str, state: Path) -> Plan:
    flags = parse(words.split())
    return plan(flags, facts_of_this_host(flags, state, {}))


def submitted(made_plan: Plan) -> tuple[JobPaths, CodeSpec, list[str]]:
    """Start it; what was written, and what was said."""
    said: list[str] = []
    start(made_plan, None, Waiting(said.append, Presses()))
    paths = JobPaths(Path(made_plan.state_dir), made_plan.spec.job)
    return paths, jobs.spec_of(paths).code, said


# --- which roots ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script_root", "source_roots", "roots"),
    [
        ("/h/gpt", (), ("/h/gpt",)),
        ("/h/gpt", ("/h/lib",), ("/h/gpt", "/h/lib")),
        ("/h/gpt", ("/h/lib", "/h/other"), ("/h/gpt", "/h/lib", "/h/other")),
        ("/h/gpt/bin", ("/h/lib", "/h/gpt"), ("/h/gpt", "/h/lib")),
        ("/h/gpt/bin", ("/h/gpt", "/h"), ("/h",)),
        ("/h/gpt", ("/h/gpt/net", "/h/gpt"), ("/h/gpt",)),
        ("/h/gpt", ("/h/lib", "/h/lib/deep", "/h/lib"), ("/h/gpt", "/h/lib")),
        ("/h/gpt", ("/h/gpt2",), ("/h/gpt", "/h/gpt2")),
    ],
)
def test_no_root_lies_within_another_and_the_scripts_comes_first(
    script_root: str, source_roots: tuple[str, ...], roots: tuple[str, ...]
) -> None:
    facts = HostFacts(**FACTS, script_root=script_root, source_roots=source_roots)
    assert code_of(parse(["t.py"]), facts) == CodeSpec(roots=roots)


def test_a_program_that_is_no_python_has_no_version() -> None:
    facts = HostFacts(**FACTS, script_root="/h/gpt", source_roots=("/h/lib",))
    code = code_of(parse(["--no-python", "./run.sh"]), facts)
    assert code == CodeSpec(why_none="the program is no Python code (--no-python)")
    assert code_of(parse(["--no-python", "--run-path", "t.py"]), facts).roots


def test_the_first_root_is_what_python_puts_in_front(here: Path, tmp_path: Path) -> None:
    plant(tmp_path, {"bin/gpt": str(here / "train.py"), "app/__main__.py": b""})
    roots = {
        "train.py": here,
        "net/layers.py": here / "net",
        f"{tmp_path}/bin/gpt": here,  # by a link
        f"{tmp_path}/app": tmp_path / "app",
        "-m net.layers": here,
    }
    for words, root in roots.items():
        assert made(words, tmp_path).spec.code.roots == (str(root),), words


def test_source_roots_are_found_from_the_working_directory(here: Path, tmp_path: Path) -> None:
    plant(tmp_path / "lib", {"lib.py": b""})
    code = made("--source-root ../lib --source_root . net/layers.py", tmp_path).spec.code
    assert code.roots == (str(here), str(tmp_path / "lib"))
    with pytest.raises(UserError, match=r"--source-root train\.py is not a directory"):
        made("--source-root train.py train.py", tmp_path)


def test_a_source_root_of_a_program_that_is_no_python_is_said_to_be_ignored(
    tmp_path: Path,
) -> None:
    (note,) = made("--no-python --source-root . ./run.sh", tmp_path).notes
    assert note.startswith("--source-root is ignored")


# --- the first version ---------------------------------------------------------------------------


def test_the_code_is_kept_as_it_was_at_submission(here: Path, tmp_path: Path) -> None:
    plant(tmp_path / "lib", {"lib.py": b"1"})
    paths, code, said = submitted(made("--source-root ../lib train.py", tmp_path / "state"))
    assert said == []
    store = CodeStore(paths.code)
    assert store.versions() == (code.version,)
    first, second = store.roots(code.version)
    assert contents(first) == TREE
    assert contents(second) == {"lib.py": b"1"}
    assert code.why_none == ""
    assert (code.files, code.size_bytes) == (len(TREE) + 1, sum(map(_size, TREE.values())) + 1)
    roots = [Path(root) for root in code.roots]
    assert lies_there(store.manifest(code.version), roots)
    (here / "train.py").write_bytes(b"import nut\n")
    assert not lies_there(store.manifest(code.version), roots)
    store.verify(code.version)
    assert jobs.spec_of(paths).working_dir == str(here)


def _size(content: bytes | str) -> int:
    """A link has none."""
    return len(content) if isinstance(content, bytes) else 0


@pytest.mark.parametrize("state", ["state", "."])
def test_what_jobs_write_is_no_part_of_it(here: Path, tmp_path: Path, state: str) -> None:
    """Also if all of it lies beside the script: the next job has the same version."""
    words = "--checkpoint-dir ckpt --local-checkpoint-dir disk --log-dir logs train.py"
    first, before, _ = submitted(made(words, here / state))
    plant(here, {"ckpt/step-1/x": b"1", "disk/y": b"2", "logs/z": b"3"})
    second, code, said = submitted(made(words, here / state))
    assert said == []
    assert before.version
    assert first.root != second.root
    linked = targets(CodeStore(second.code).manifest(code.version))
    written = {name: str(here / name) for name in ("ckpt", "disk", "logs")}
    assert linked == {**written, "latest.yaml": "configs/small.yaml"}


def test_what_is_too_large_is_not_versioned_and_the_job_starts(here: Path, tmp_path: Path) -> None:
    with (here / "data.bin").open("wb") as big:
        big.truncate(10 << 30)
    paths, code, said = submitted(made("train.py", tmp_path / "state"))
    assert code.version == NO_VERSION
    assert code.roots == (str(here),)
    assert f"{here}/data.bin has 10.0 GiB" in code.why_none
    assert said == [f"the code is not versioned: {code.why_none}"]
    assert CodeStore(paths.code).versions() == ()


def test_a_copy_that_fails_is_a_reason_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "/state/x")

    monkeypatch.setattr(CodeStore, "add", full)
    _, code, _ = submitted(made("train.py", tmp_path / "state"))
    assert code.why_none == "/state/x cannot be read or copied: No space left on device"


def test_a_root_that_cannot_be_read_is_a_reason_and_no_failure() -> None:
    with tempfile.TemporaryDirectory() as name:
        root = plant(Path(name) / "gpt", TREE)
        plan_of = made(f"{root}/train.py", Path(name) / "state")
        store = CodeStore(Path(name) / "code")
        root.chmod(0o111)
        Path(name).chmod(0o755)
        said: list[str] = []
        with as_nobody():
            spec = source.versioned(plan_of.spec, store, source.Apart((), ()), said.append)
        assert spec.code.why_none == f"{root} cannot be read or copied: Permission denied"
        assert len(said) == 1


def test_a_file_that_is_away_for_a_moment_is_looked_for_again(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when an editor saves it."""
    looks: list[int] = []

    def take(*words: Any, **more: Any) -> Any:
        looks.append(1)
        if len(looks) > 1:
            plant(here, {"train.py": b"new = 1\n"})
        found = snapshots.take(*words, **more)
        if len(looks) == 1:
            (here / "train.py").unlink()
        return found

    monkeypatch.setattr(source, "take", take)
    paths, code, said = submitted(made("train.py", tmp_path / "state"))
    assert said == []
    assert len(looks) == 2
    (root,) = CodeStore(paths.code).roots(code.version)
    assert (root / "train.py").read_bytes() == b"new = 1\n"


def test_remarks_are_said(here: Path, tmp_path: Path) -> None:
    os.mkfifo(here / "pipe")
    _, code, said = submitted(made("train.py", tmp_path / "state"))
    assert code.version
    assert said == [f"Left out, as no file, directory or link: {here}/pipe."]


def test_only_the_leader_of_a_job_keeps_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_wait_controller", lambda *_: "a-token")
    words = "--nnodes 2 --node-rank 1 --rdzv-endpoint 127.0.0.1:29511 --job j train.py"
    made_plan = made(words, tmp_path / "state")
    assert made_plan.leads is Leads.NO
    paths, code, said = submitted(made_plan)
    assert not paths.code.exists()
    assert code.version == NO_VERSION
    assert said == []


# --- --dry-run -----------------------------------------------------------------------------------


def test_a_dry_run_says_what_would_be_versioned(here: Path, tmp_path: Path) -> None:
    os.mkfifo(here / "pipe")
    text = described(made("train.py", tmp_path / "state"))
    _, code, _ = submitted(made("train.py", tmp_path / "state"))
    assert f"code version {code.version[:12]}: 5 files, 0.00 MiB in {here}" in text
    assert f"  Left out, as no file, directory or link: {here}/pipe." in text


def test_a_dry_run_says_why_nothing_would_be(here: Path, tmp_path: Path) -> None:
    (here / ".everstepignore").write_bytes(b"!x\n")
    text = "\n".join(described(made("train.py", tmp_path)))
    assert f"the code is not versioned: {here}/.everstepignore, line 1" in text
    text = "\n".join(described(made("--no-python ./run.sh", tmp_path)))
    assert "the code is not versioned: the program is no Python code (--no-python)" in text


def test_a_dry_run_writes_nothing(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--dry-run", "--state-dir", str(tmp_path / "state"), "train.py"]
    assert run_command(argv, {}, None) == 0
    assert "code version" in capsys.readouterr().out
    assert not (tmp_path / "state").exists()
    assert contents(here) == TREE
