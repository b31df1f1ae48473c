"""Programs that are no plain script are tried as Python would run them, in fresh interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

import everstep
from everstep.agent.fork import TryReply, TryRequest
from everstep.agent.placing import Placed
from everstep.model import VersionId

TRY = """
import sys
import msgspec
from everstep.agent import importing
from everstep.agent.fork import TryRequest
request = msgspec.json.decode(sys.stdin.buffer.read(), type=TryRequest)
reply = importing.run(request, lambda what: None)
sys.stderr.buffer.write(msgspec.json.encode(reply))
"""
SOURCES = Path(everstep.__file__).parents[1]
MAIN = "import os\nfrom pkg import helper\nraise SystemExit('the body ran')\n"


class Tree:
    """The source root of a job, and a version that is run in its place."""

    def __init__(self, root: Path) -> None:
        self.work, self.now = root / "work", root / "now"
        self.work.mkdir()
        self.now.mkdir()

    def has(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = self.now / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def attempt(self, *command: str, env: dict[str, str] | None = None, **fields: Any) -> TryReply:
        request = TryRequest(
            version=VersionId("1" * 64),
            command=command,
            working_dir=str(self.work),
            roots=(str(self.now),),
            places=(Placed(root=str(self.work), now=str(self.now)),),
            files=tuple(str(path) for path in self.now.rglob("*") if path.is_file()),
            to_compile=(),
            within_s=60.0,
            beside_ranks=False,
            **{"module": False, **fields},
        )
        done = subprocess.run(
            [sys.executable, "-P", "-c", TRY],
            input=msgspec.json.encode(request),
            capture_output=True,
            cwd=self.work,
            env=os.environ | (env or {}),
            check=True,
            timeout=60,
        )
        return msgspec.json.decode(done.stderr, type=TryReply)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_module_and_its_package_are_the_versions(tree: Tree) -> None:
    tree.has({"pkg/__init__.py": "", "pkg/helper.py": "", "pkg/train.py": MAIN})
    assert tree.attempt("pkg.train", module=True) == TryReply()
    tree.has({"pkg/helper.py": "import gone"})
    problem = tree.attempt("pkg.train", module=True).problem
    assert problem == "ModuleNotFoundError: No module named 'gone' (pkg/helper.py, line 1)"
    problem = tree.attempt("pkg.other", module=True).problem
    assert problem == "there is no module pkg.other that could be run"


def test_a_package_runs_by_its_main(tree: Tree) -> None:
    tree.has({"pkg/__init__.py": "", "pkg/helper.py": "", "pkg/__main__.py": "from . import gone"})
    said = tree.attempt("pkg", module=True).problem
    assert said.startswith("ImportError: cannot import name 'gone' from 'pkg'"), said


def test_a_directory_is_put_in_front_itself(tree: Tree) -> None:
    tree.has({"app/pkg/helper.py": "", "pkg/wrong.py": ""})
    assert tree.attempt("app").problem == f"there is no __main__ in {tree.now}/app"
    tree.has({"app/__main__.py": MAIN})
    assert tree.attempt("app") == TryReply()


@pytest.mark.parametrize(("helper", "said"), [("", ""), ("import gone", "No module named 'gone'")])
def test_a_zip_file_is_looked_into(tree: Tree, helper: str, said: str) -> None:
    with zipfile.ZipFile(tree.now / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", MAIN)
        archive.writestr("pkg/__init__.py", "")
        archive.writestr("pkg/helper.py", helper)
    reply = tree.attempt("app.pyz")
    assert said in reply.problem
    assert bool(said) == bool(reply.problem)
    assert not reply.untold
    assert not reply.elsewhere


def test_no_directory_is_put_in_front_where_python_would_not(tree: Tree) -> None:
    tree.has({"train.py": "import beside", "beside.py": ""})
    assert tree.attempt("train.py") == TryReply()
    problem = tree.attempt("train.py", env={"PYTHONSAFEPATH": "1"}).problem
    assert problem == "ModuleNotFoundError: No module named 'beside' (train.py, line 1)"


def test_a_rank_has_the_directory_in_front_where_python_would(tree: Tree) -> None:
    tree.has({"train.py": "import sys\nprint(sys.path)\n"})

    def path_of(*command: str, safe: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            cwd=tree.now,
            env=os.environ | {"PYTHONSAFEPATH": safe, "PYTHONPATH": str(SOURCES)},
            check=False,
            timeout=60,
        )
        return done.returncode, done.stdout

    for safe in ("", "1"):
        for words in (["train.py"], ["-m", "train"]):
            ours = path_of("-P", "-m", "everstep.agent.rank_main", *words, safe=safe)
            assert ours == path_of(*words, safe=safe), (safe, words)


@pytest.mark.parametrize(
    ("line", "sure"),
    [
        ("print(sys.path[:2], sys.path)", True),
        ("shown = [f'{entry}' for entry in sys.path if entry in sys.path]", True),
        ("sys.path[0:0] = computed()", False),
        ("add(sys.path)", False),
    ],
)
def test_who_only_reads_the_path_is_sure_of_it(tree: Tree, line: str, *, sure: bool) -> None:
    tree.has({"train.py": f"import sys\ndef main():\n    {line}\nimport gone\n"})
    reply = tree.attempt("train.py")
    assert "No module named 'gone'" in (reply.problem if sure else reply.untold)
    assert bool(reply.problem) == sure
