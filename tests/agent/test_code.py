"""Promises about code versions on one machine: how they come, and what ranks run of them.

Real keeper, agent, launcher and ranks, with and without fork; only the controller is small.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.agent.fork import (
    GREETING,
    NothingCame,
    Request,
    TryReply,
    TryRequest,
    frame,
    read_request,
)
from everstep.agent.transfer.desk import Desk
from everstep.agent.transfer.identity import Identity
from everstep.agent.transfer.server import ShardServer
from everstep.code.snapshot import take
from everstep.code.store import CodeStore
from everstep.events import (
    MachineJoined,
    MachineReady,
    RankExited,
    VersionHeld,
    VersionNotHeld,
    VersionTried,
)
from everstep.model import (
    AgentAt,
    ChecksSpec,
    CodeSpec,
    Generation,
    MachineId,
    Rank,
    VersionId,
)
from tests.agent.fake_controller import TOKEN, FakeController
from tests.agent.support import DEADLINE_S, Job, lines

pytestmark = pytest.mark.torch

TRAIN = """
    import sys
    import extra
    import shown

    if __name__ == "__main__":
        shown.show(__file__, sys.argv, extra.__file__)
"""
SHOWN = """
    import os, sys
    TEXT = "first"

    def show(file, argv, extra):
        ours = os.environ["TESTS"]
        paths = [[entry for entry in entries if entry.startswith(ours)]
                 for entries in (sys.path, os.environ["PYTHONPATH"].split(":"))]
        version = os.environ.get("EVERSTEP_CODE_VERSION")
        print(TEXT, os.getcwd(), file, argv, extra, *paths, version, sep=chr(10), flush=True)
"""


class Place:
    """One machine whose controller has code versions to give."""

    def __init__(
        self,
        root: Path,
        name: str,
        *command: str,
        services: tuple[str, ...] = ("agent", "launcher"),
        **fields: Any,
    ) -> None:
        self.job = Job(root, f"{name}{os.getpid()}")
        self.write(TRAIN, SHOWN)
        self.given = CodeStore(root / "given")
        self.first = self.given.add(take([self.job.work]))
        path = [*filter(None, [os.environ.get("PYTHONPATH")]), f"{self.work}/lib"]
        code = CodeSpec(version=self.first, roots=(str(self.job.work),))
        self.job.describe(
            command or ["train.py", "--lr", "1"],
            code=code,
            env={"TESTS": str(root), "PYTHONPATH": ":".join(path)},
            **{"nproc_per_node": 1, "checks": ChecksSpec(on=False), **fields},
        )
        self.controller = FakeController(self.job.paths)
        self.controller.code = self.given
        self.generation = 0
        self.job.start(*services)
        self.controller.get(MachineJoined)

    @property
    def work(self) -> Path:
        return self.job.work

    def write(self, train: str = TRAIN, shown: str = SHOWN) -> None:
        self.job.script("train.py", train)
        self.job.script("shown.py", shown)
        self.job.script("lib/extra.py", "")

    def updated(self, **files: str) -> VersionId:
        """A version like the first one, but for these files."""
        new = self.work.parent / "new"
        shutil.rmtree(new, ignore_errors=True)
        [root] = self.given.roots(self.first)
        shutil.copytree(root, new)
        for name, text in files.items():
            path = new / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(exist_ok=True)
            path.unlink(missing_ok=True)
            path.write_text(textwrap.dedent(text))
        return self.given.add(take([new]))

    def run(self, version: VersionId) -> list[str]:
        """What a rank of this version prints until it ends."""
        self.generation += 1
        self.controller.start_ranks(self.generation, version=version)
        self.controller.get(RankExited, lambda end: end.generation == self.generation)
        log = self.job.machine.rank_log(Generation(self.generation), Rank(0))
        return lines(log)

    def root(self, version: VersionId) -> str:
        return f"{self.job.machine.code}/{version}/root-0"

    def close(self) -> None:
        self.job.stop()
        self.controller.stop()


Make = Callable[..., Place]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes a machine of its own, which is gone after the test."""
    with contextlib.ExitStack() as made:

        def one(*command: str, **fields: Any) -> Place:
            place = Place(tmp_path, "x", *command, **fields)
            made.callback(place.close)
            return place

        yield one


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("code"), "c")
    yield place
    place.close()


@pytest.fixture
def place(shared: Place) -> Iterator[Place]:
    """With its directory as it was, and the first version held."""
    shared.write()
    assert isinstance(shared.controller.hold(shared.first), VersionHeld)
    yield shared
    for path in shared.work.iterdir():
        if path.name not in ("train.py", "shown.py", "lib"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def ran_in(root: str, place: Place, text: str, version: VersionId, script: str) -> list[str]:
    """What a script shows whose code lies in this directory."""
    argv = [script, "--lr", "1"]
    paths = [[root, f"{root}/lib"], [f"{root}/lib"]]
    file, extra = f"{root}/train.py", f"{root}/lib/extra.py"
    return [text, str(place.work), file, str(argv), extra, *map(str, paths), version]


def in_place(place: Place) -> list[str]:
    """What a script shows that runs where the user has it, as under python itself."""
    return ran_in(str(place.work), place, "first", place.first, "train.py")


def in_store(place: Place, text: str, version: VersionId) -> list[str]:
    root = place.root(version)
    return ran_in(root, place, text, version, f"{root}/train.py")


def test_the_first_version_runs_where_the_user_has_it(place: Place) -> None:
    assert place.run(place.first) == in_place(place)
    place.work.joinpath("log.txt").write_text("what a run leaves behind")
    place.work.joinpath("outputs").mkdir()
    assert place.run(place.first) == in_place(place)


EDITS = {
    "a file is edited": lambda work: (work / "shown.py").write_text("raise SystemExit(9)"),
    "a file is removed": lambda work: (work / "shown.py").unlink(),
    "a package comes before a module": lambda work: (
        (work / "shown").mkdir(),
        (work / "shown" / "__init__.py").write_text("raise SystemExit(9)"),
    ),
    "an edit keeps size and time": lambda work: rewrite(work / "shown.py"),
}


def rewrite(path: Path) -> None:
    before = path.stat()
    new = path.with_name("new")
    new.write_text(path.read_text().replace("first", "other"))
    os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
    new.replace(path)


@pytest.mark.parametrize("edit", EDITS)
def test_what_is_edited_in_place_changes_nothing_that_runs(place: Place, edit: str) -> None:
    assert place.run(place.first) == in_place(place)
    EDITS[edit](place.work)
    assert place.run(place.first) == in_store(place, "first", place.first)


def test_what_is_undone_runs_in_place_again(place: Place) -> None:
    place.write(shown="raise SystemExit(9)")
    assert place.run(place.first) == in_store(place, "first", place.first)
    place.write()
    assert place.run(place.first) == in_place(place)


def test_a_new_version_runs_from_the_store_in_the_same_directory(place: Place) -> None:
    version = place.updated(shown=SHOWN.replace("first", "second"))
    assert isinstance(place.controller.hold(version), VersionHeld)
    assert place.run(version) == in_store(place, "second", version)
    assert place.run(place.first) == in_place(place), "and back"


def test_a_version_that_is_here_is_not_asked_for_again(place: Place) -> None:
    before = len(place.controller.asked_for)
    assert isinstance(place.controller.hold(place.first), VersionHeld)
    assert len(place.controller.asked_for) == before


def test_other_versions_are_kept_as_long_as_somebody_may_ask_for_them(place: Place) -> None:
    place.run(place.first)
    versions = [place.updated(shown=f"x = {number}") for number in range(3)]
    place.controller.hold(versions[0])
    place.controller.hold(versions[1], keep=(versions[0],))
    store = CodeStore(place.job.machine.code)
    assert set(store.versions()) == {place.first, versions[0], versions[1]}
    place.controller.hold(versions[2])
    assert set(store.versions()) == {place.first, versions[2]}


def test_what_runs_is_kept_too(place: Place) -> None:
    running, other = place.updated(shown=SHOWN + "    # 1"), place.updated(shown="x = 'other'")
    place.controller.hold(running)
    place.run(running)
    place.controller.hold(other)
    assert running in CodeStore(place.job.machine.code).versions()


def test_a_version_that_nobody_has_is_not_held(place: Place) -> None:
    answer = place.controller.hold(VersionId("ab" * 32))
    assert isinstance(answer, VersionNotHeld)
    assert "HTTP status 404 there is no such version" in answer.reason


def test_a_damaged_answer_is_not_taken(place: Place) -> None:
    version = place.updated(shown="x = 'damaged'")
    [root] = place.given.roots(version)
    damaged = Path(root) / "shown.py"
    damaged.chmod(0o600)
    damaged.write_text("x = 'DAMAGED'")
    answer = place.controller.hold(version)
    assert isinstance(answer, VersionNotHeld)
    assert not CodeStore(place.job.machine.code).has(version)


def test_a_fresh_interpreter_runs_the_same(make: Make) -> None:
    place = make(no_fork=True)
    assert isinstance(place.controller.hold(place.first), VersionHeld)
    assert place.run(place.first) == in_place(place)
    version = place.updated(shown=SHOWN.replace("first", "second"))
    assert isinstance(place.controller.hold(version), VersionHeld)
    assert place.run(version) == in_store(place, "second", version)


def test_a_module_is_imported_from_the_version(make: Make) -> None:
    place = make("train", "--lr", "1", module=True, no_fork=True)
    assert isinstance(place.controller.hold(place.first), VersionHeld)
    script = f"{place.work}/train.py"
    assert place.run(place.first) == ran_in(str(place.work), place, "first", place.first, script)
    version = place.updated(shown=SHOWN.replace("first", "second"))
    assert isinstance(place.controller.hold(version), VersionHeld)
    assert place.run(version) == in_store(place, "second", version)


def test_workers_that_are_spawned_run_the_version_too(place: Place) -> None:
    train = """
        import multiprocessing, sys
        import shown

        def work():
            print(__name__, __file__, shown.TEXT, sys.path[0], flush=True)

        if __name__ == "__main__":
            process = multiprocessing.get_context("spawn").Process(target=work)
            process.start()
            process.join()
    """
    version = place.updated(train=train, shown="TEXT = 'second'")
    assert isinstance(place.controller.hold(version), VersionHeld)
    root = place.root(version)
    assert place.run(version) == [f"__mp_main__ {root}/train.py second {root}"]


@contextlib.contextmanager
def peer(place: Place, store: CodeStore) -> Iterator[AgentAt]:
    """Another machine's agent that gives what is in this store."""
    machine = MachineId("m7")
    desk = Desk(Identity(TOKEN.encode(), place.job.uid, machine), place.work.parent / "m7", store)
    listener = socket.create_server(("127.0.0.1", 0))
    server = ShardServer(listener, desk, lambda _: None)
    server.start()
    yield AgentAt(machine=machine, address="127.0.0.1", port=server.port)
    server.close()


def test_a_version_comes_from_another_agent_else_from_the_controller(
    make: Make, tmp_path: Path
) -> None:
    place = make(nnodes=2, no_fork=True)
    version = place.updated(shown="x = 'from a peer'")
    empty = CodeStore(tmp_path / "empty")
    with peer(place, place.given) as other:
        assert isinstance(place.controller.hold(version, sources=(other,)), VersionHeld)
    assert place.controller.asked_for == []
    with peer(place, empty) as other:
        assert isinstance(place.controller.hold(place.first, sources=(other,)), VersionHeld)
    assert place.controller.asked_for == [place.first]


def test_a_restarted_agent_says_what_it_holds(place: Place) -> None:
    known = {joined.agent for joined in place.controller.all(MachineJoined)}
    os.kill(place.job.pid("agent"), signal.SIGKILL)
    joined = place.controller.get(MachineJoined, lambda each: each.agent not in known)
    assert joined.versions == CodeStore(place.job.machine.code).versions()
    assert place.first in joined.versions


@contextlib.contextmanager
def launcher_of(place: Place) -> Iterator[socket.socket]:
    """Where the agent looks for its launcher, if none was started."""
    with socket.socket(socket.AF_UNIX) as launcher:
        launcher.bind(str(place.job.machine.launcher_socket))
        launcher.listen()
        launcher.settimeout(DEADLINE_S)
        yield launcher


def test_a_trial_has_what_its_launcher_left_of_its_time(make: Make) -> None:
    """Else it would run on when everybody has given it up."""
    place = make(services=("agent",))
    assert isinstance(place.controller.hold(place.first), VersionHeld)
    order = place.controller.try_order(place.first, within_s=600.0)
    place.controller.order(order)
    with launcher_of(place) as launcher:
        request: Request | None = None
        while not isinstance(request, TryRequest):
            connection, _ = launcher.accept()
            with connection, connection.makefile("rb") as stream:
                connection.sendall(GREETING)
                with contextlib.suppress(NothingCame):  # it asks whether the launcher is warm, too
                    request = read_request(stream)
                    connection.sendall(frame(TryReply(problem="so says the launcher")))
    assert 0.0 < request.within_s < order.within_s
    assert place.controller.answer_to(order, VersionTried).problem == "so says the launcher"


def test_readiness_is_said_once_and_to_every_later_controller(make: Make) -> None:
    place = make(services=("agent",))
    place.controller.get(MachineJoined, lambda joined: not joined.ready)
    assert isinstance(place.controller.hold(place.first), VersionHeld)
    assert not place.controller.all(MachineReady)
    with launcher_of(place) as launcher:
        connection, _ = launcher.accept()
        connection.sendall(GREETING)
        place.controller.get(MachineReady)
        connection.close()
    place.controller.stop()
    later = FakeController(place.job.paths, term=2, before=place.controller)
    joined = later.get(MachineJoined)
    assert (joined.ready, joined.versions) == (True, (place.first,))
    assert len([*place.controller.all(MachineReady), *later.all(MachineReady)]) == 1
    place.controller = later
