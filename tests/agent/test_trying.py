"""Promises of a trial: what a code version would break is known before a rank runs it.

Real keeper, agent, launcher and torch. One machine serves all tests: each puts a version into its
store, and has it tried.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.code.snapshot import take
from everstep.code.store import CodeStore
from everstep.events import MachineJoined, StartFailed, VersionTried
from everstep.model import CodeSpec, VersionId
from everstep.processes import snapshot
from tests.agent.fake_controller import FakeController
from tests.agent.support import Job, is_running, lines, wait_for

pytestmark = pytest.mark.torch
SLASH = r"(?<=[a-z])__(?=[a-z]|__)"
"""What stands for a slash in the names of keyword arguments."""


class Place:
    """One machine, its controller, and a directory from which versions are made."""

    def __init__(self, job: Job, controller: FakeController) -> None:
        self.job = job
        self.controller = controller
        self.store = CodeStore(job.machine.code)
        self.new = job.work.parent / "new"

    def version(self, **files: str) -> VersionId:
        """A version with these files; "__" in a name stands for a slash, no suffix for .py."""
        shutil.rmtree(self.new, ignore_errors=True)
        for name, text in files.items():
            path = self.new / (re.sub(SLASH, "/", name) + ("" if "." in name else ".py"))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        return self.store.add(take([self.new]))

    def attempt(self, files: dict[str, str], **fields: Any) -> VersionTried:
        return self.controller.try_version(self.version(**files), **fields)

    def strangers(self) -> set[int]:
        """Processes of this machine that are no service and no parked rank."""
        keeper = self.job.pid("keeper")
        services = {self.job.pid(name) for name in ("agent", "launcher")}
        table = snapshot()
        launcher = self.job.pid("launcher")
        return {
            pid
            for pid, entry in table.items()
            if entry.parent == keeper and pid not in services and entry.session != launcher
        }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    job = Job(tmp_path_factory.mktemp("trying"), f"t{os.getpid()}")
    job.script("train.py", "import helper")
    job.script("helper.py", "")
    job.script("never_compiled.py", "print 'python 2'")
    store = CodeStore(job.machine.code)
    version = store.add(take([job.work]))
    job.describe(
        ["train.py"],
        code=CodeSpec(version=version, roots=(str(job.work),)),
        env={"JOBS_OWN": "7"},
        nproc_per_node=1,
    )
    controller = FakeController(job.paths)
    job.start("agent", "launcher")
    assert controller.get(MachineJoined).versions == (version,)
    assert not controller.try_version(version).untold, "the launcher is warm from now on"
    yield Place(job, controller)
    job.stop()
    controller.stop()


def test_a_script_is_not_run_but_what_it_imports_is(place: Place, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    tried = place.attempt(
        {
            "train": f"""
                import helper
                from package.inner import value
                open({str(mark)!r}, "a").write("body")
                raise SystemExit("the body ran")
            """,
            "helper": f"""
                import os, sys
                import torch
                print("to standard output")
                report = [os.getcwd(), os.environ["JOBS_OWN"], os.environ["EVERSTEP_CODE_VERSION"]]
                report += [str("RANK" in os.environ), sys.path[0], __file__]
                open({str(mark)!r}, "a").write(chr(10).join(report) + chr(10))
            """,
            "package____init__": "",
            "package__inner": "from . import other\nvalue = other.value",
            "package__other": "value = 1",
        }
    )
    assert (tried.problem, tried.untold, tried.elsewhere) == ("", "", ())
    assert tried.took_s > 0
    root = place.store.root / tried.version / "root-0"
    assert mark.read_text().splitlines() == [
        str(place.job.work),
        "7",
        tried.version,
        "False",
        str(root),
        f"{root}/helper.py",
    ]


PROBLEMS = {
    "a module that is not there": (
        {"train": "import os\nimport no_such_module"},
        "ModuleNotFoundError: No module named 'no_such_module' (train.py, line 2)",
    ),
    "a name that is not there": (
        {"train": "from helper import gone", "helper": ""},
        "ImportError: cannot import name 'gone' from 'helper'",
    ),
    "a module that raises": (
        {"train": "import helper", "helper": "\n\nx = 1 + 'a'"},
        "TypeError: unsupported operand type(s) for +: 'int' and 'str' (helper.py, line 3)",
    ),
    "a file that is not imported and not Python": (
        {"train": "", "package__broken": "def f(:\n    pass"},
        "SyntaxError: invalid syntax (package/broken.py, line 1)",
    ),
    "a script that is not Python": (
        {"train": "x = = 1"},
        "SyntaxError: invalid syntax (train.py, line 1)",
    ),
    "a script that is gone": ({"other": ""}, "the script cannot be read: No such file"),
    "a module that exits": (
        {"train": "import helper", "helper": "import sys\nsys.exit('no data')"},
        "SystemExit: no data (helper.py, line 2)",
    ),
    "a module that ends the process": (
        {"train": "import os\nimport helper", "helper": "import os\nos._exit(3)"},
        "it ends the process with exit code 3: line 2, import helper",
    ),
    "a module that crashes": (
        {"train": "import helper", "helper": "import os\nos.kill(os.getpid(), 11)"},
        "its process was ended by SIGSEGV: line 1, import helper",
    ),
    "a handler that gives up": (
        {"train": "try:\n    import gone\nexcept ImportError:\n    raise RuntimeError('x')"},
        "ModuleNotFoundError: No module named 'gone' (train.py, line 2)",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problem_is_said_with_its_place(place: Place, name: str) -> None:
    files, problem = PROBLEMS[name]
    tried = place.attempt(files)
    assert tried.problem.startswith(problem), tried
    assert not tried.untold
    assert "importing.py" not in tried.detail


FINE = {
    "imports that may fail": """
        try:
            import gone
        except (ImportError, OSError):
            gone = None
        from contextlib import suppress
        with suppress(ImportError):
            import gone_too
    """,
    "what is run as the main script only": """
        def main():
            import gone
        if __name__ == "__main__":
            import helper
            main()
    """,
    "what only a type checker imports": """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            import gone
    """,
    "a path that the script adds": """
        import os, sys
        from pathlib import Path
        HERE = Path(__file__).resolve().parent
        sys.path.insert(0, str(HERE / "lib"))
        os.environ["WANTED"] = "1"
        import inner
    """,
    "what nobody knows": """
        if undefined_here:
            import gone
    """,
}


@pytest.mark.parametrize("name", FINE)
def test_what_would_run_is_no_problem(place: Place, name: str) -> None:
    inner = "import os\nassert os.environ['WANTED']"
    tried = place.attempt({"train": FINE[name], "helper": "", "lib__inner": inner})
    assert (tried.problem, tried.untold) == ("", ""), tried


def test_what_never_compiled_says_nothing_against_a_new_version(place: Place) -> None:
    old = (place.job.work / "never_compiled.py").read_text()
    assert not place.attempt({"train": "", "never_compiled": old}).problem
    assert "never_compiled.py" in place.attempt({"train": "", "never_compiled": old + "#"}).problem


def test_a_path_that_was_not_computed_leaves_missing_modules_untold(place: Place) -> None:
    script = """
        import sys
        def set_up():
            sys.path.append("/somewhere")
        set_up()
        import elsewhere
    """
    tried = place.attempt({"train": script})
    assert tried.untold.startswith("the script changes sys.path in its own way"), tried
    assert not tried.problem


def test_what_only_ranks_have_leaves_it_untold(place: Place) -> None:
    tried = place.attempt({"train": "import helper", "helper": "import os\nos.environ['RANK']"})
    assert tried.untold.startswith("it reads what only ranks have")


def test_beside_ranks_no_gpu_is_seen_and_none_is_missed(place: Place) -> None:
    helper = """
        import os
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        assert os.nice(0) == 19
        raise RuntimeError("No CUDA GPUs are available")
    """
    tried = place.attempt({"train": "import helper", "helper": helper}, beside_ranks=True)
    assert tried.untold.startswith("it was tried without a GPU"), tried
    assert not tried.problem


def test_what_is_imported_from_elsewhere_is_named(place: Place, tmp_path: Path) -> None:
    (tmp_path / "not_versioned.py").write_text("")
    script = f"import sys\nsys.path.append({str(tmp_path)!r})\nimport json, torch, not_versioned"
    tried = place.attempt({"train": script})
    assert tried.elsewhere == (str(tmp_path / "not_versioned.py"),)


def test_what_does_not_end_is_ended_with_all_that_it_started(place: Place, tmp_path: Path) -> None:
    """Threads, children, what left its session and what lost its parent; the launcher is free."""
    pids = tmp_path / "pids"
    helper = f"""
        import ctypes, os, subprocess, threading, time
        threading.Thread(target=time.sleep, args=(1000,)).start()
        print("a word before")
        script = "trap '' TERM HUP; echo $$ >> {pids}; sleep 1000 & echo $! >> {pids}; wait"
        subprocess.Popen(["setsid", "sh", "-c", script])
        subprocess.Popen(["sh", "-c", f"setsid sh -c \\"sleep 1000 & echo \\\\$! >> {pids}\\" &"])
        open("{pids}", "a").write(str(os.getpid()) + chr(10))
        if os.fork() == 0:  # its main thread is a zombie, another one keeps the process
            threading.Thread(target=time.sleep, args=(1000,)).start()
            child = subprocess.Popen(["sleep", "1000"])
            open("{pids}", "a").write(f"{{os.getpid()}}" + chr(10) + f"{{child.pid}}" + chr(10))
            ctypes.CDLL(None).pthread_exit(None)
        time.sleep(1000)
    """
    order = place.controller.try_order(
        place.version(train="import helper", helper=helper), within_s=6.0
    )
    place.controller.order(order)
    wait_for("all of it", lambda: len(lines(pids)) == 6)
    started = [int(line) for line in lines(pids)]
    tried = place.controller.answer_to(order, VersionTried)
    assert tried.untold == "it did not end within 6 s: line 1, import helper"
    assert tried.detail == "a word before\n"
    wait_for("the end of all", lambda: not any(map(is_running, started)))
    wait_for("nothing to be left", lambda: not place.strangers())


def test_ranks_start_while_a_trial_hangs_and_their_end_ends_it(place: Place) -> None:
    place.job.script("train.py", "import time; print('trains', flush=True); time.sleep(1000)")
    generation = place.job.next_generation()
    port = place.controller.stop_ranks(generation).store_port
    slow = place.version(train="import helper", helper="import time; time.sleep(1000)")
    order = place.controller.try_order(slow)
    place.controller.order(order)
    trial = wait_for("the trial", place.strangers)
    place.controller.start_ranks(generation, port)
    assert trial < place.strangers(), "both are there"
    place.controller.stop_ranks(place.job.next_generation())
    tried = place.controller.answer_to(order, VersionTried)
    assert tried.untold.startswith("the process that tried it was ended"), tried
    wait_for("nothing to be left", lambda: not place.strangers())


def test_a_trial_ends_with_the_agent_that_wanted_it(place: Place) -> None:
    slow = place.version(train="import helper", helper="import time; time.sleep(1000)")
    place.controller.order(place.controller.try_order(slow))
    wait_for("the trial", place.strangers)
    agent = place.job.pid("agent")
    os.kill(agent, signal.SIGKILL)
    place.job.pid("agent", other_than=agent)
    wait_for("nothing to be left", lambda: not place.strangers())


def test_a_version_that_is_not_here_is_untold(place: Place) -> None:
    missing = VersionId("ab" * 32)
    assert "is not on this machine" in place.controller.try_version(missing).untold
    generation = place.job.next_generation()
    port = place.controller.stop_ranks(generation).store_port
    place.controller.order(place.controller.start_order(generation, port, version=missing))
    failed = place.controller.get(StartFailed, lambda f: f.generation == generation)
    assert "is not on this machine" in failed.reason
