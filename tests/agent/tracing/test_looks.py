"""Promises of a look at ranks that train with gloo: real agent, launcher, ranks, loader workers.

One machine serves all tests of this module; its controller is small.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.actions import CollectStacks, SendStacks
from everstep.diagnosis.activity import Activity, doing
from everstep.diagnosis.findings import Place
from everstep.diagnosis.frames import Dump
from everstep.events import MachineJoined, RankExited
from everstep.looks import RankLook, Role, Stack, Stood
from everstep.model import AgentAt, MachineId
from everstep.sightings import MachineStacks, StacksSent
from everstep.trainer.heartbeat import Heartbeat, SlotReader
from tests.agent.fake_controller import MACHINE, FakeController
from tests.agent.support import Job, wait_for
from tests.agent.tracing.training import PARTED, TRAIN

pytestmark = pytest.mark.torch
FREEZER = Path("/sys/fs/cgroup/freezer")


class Training:
    """The job, and whoever looks at it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.controller = FakeController(job.paths)
        self.trains = False
        self._looks = 0
        os.mkfifo(job.work / "answers")

    def start(self, script: str) -> None:
        self.job.script("train.py", script)
        self.controller.start_ranks(self.job.next_generation())

    def train(self) -> None:
        if not self.trains:
            self.start(TRAIN)
            self.trains = True
        self.goes_on()

    def beats(self) -> list[Heartbeat]:
        reader = SlotReader(self.job.shm / "heartbeat", 2)
        found = [beat for beat in reader.read() if beat is not None]
        reader.close()
        return [beat for beat in found if beat.generation == self.job.generation]

    def steps(self) -> list[int]:
        return [beat.step for beat in self.beats()]

    def goes_on(self) -> None:
        """Waits until both ranks have done some more steps."""
        before = max(self.steps(), default=0)
        wait_for("steps", lambda: len(self.steps()) == 2 and min(self.steps()) > before + 2)

    def order(self, **fields: object) -> CollectStacks:
        self._looks += 1
        return CollectStacks(
            id=f"look-{self._looks}",
            cause="test",
            why="a test",
            machine=MACHINE,
            generation=self.job.generation,  # type: ignore[arg-type]
            look=self._looks,
            **{"within_s": 30.0, "native": False, **fields},  # type: ignore[arg-type]
        )

    def look(self, **fields: object) -> MachineStacks:
        order = self.order(**fields)
        self.controller.order(order)
        return self.controller.get(MachineStacks, lambda each: each.action == order.id)

    def texts(self, taken: MachineStacks) -> dict[str, Stack]:
        """Of all stacks of a look."""
        names = {look.posture.rank.stack for look in taken.ranks}
        names |= {child.shown.stack for look in taken.ranks for child in look.posture.children}
        order = SendStacks(
            id=f"texts-{taken.look}",
            cause="test",
            why="a test",
            machine=MACHINE,
            look=taken.look,
            stacks=tuple(sorted(name for name in names if name)),
        )
        self.controller.order(order)
        sent = self.controller.get(StacksSent, lambda each: each.action == order.id)
        assert [stack.fingerprint for stack in sent.stacks] == list(order.stacks)
        return {stack.fingerprint: stack for stack in sent.stacks}

    def ask(self, rank: int, function: str) -> None:
        """Have a rank call this in its next step, and wait until the other one waits for it."""
        doing_it = self.job.work / f"doing-{rank}"
        doing_it.unlink(missing_ok=True)
        beside = self.job.work / f".do-{rank}"
        beside.write_text(function)
        beside.rename(self.job.work / f"do-{rank}")
        wait_for("it to be done", doing_it.exists)

    def answer(self) -> None:
        """To whoever reads answers."""
        with (self.job.work / "answers").open("wb") as answers:
            answers.write(b"y")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    job = Job(tmp_path_factory.mktemp("looks"), f"k{os.getpid()}")
    job.describe(["train.py"], env={"GLOO_SOCKET_IFNAME": "lo"})
    training = Training(job)
    job.start("agent", "launcher")
    training.controller.get(MachineJoined)
    yield training
    job.stop()
    training.controller.stop()


@pytest.fixture
def training(shared: Training) -> Iterator[Training]:
    """The shared job, which trains again after every test."""
    shared.train()
    yield shared
    shared.goes_on()
    assert not shared.controller.all(RankExited)


def of_rank(taken: MachineStacks, rank: int) -> RankLook:
    (found,) = [look for look in taken.ranks if look.rank == rank]
    return found


def does(stack: Stack) -> str:
    """What it shows, in words."""
    return str(doing(Dump(place=Place(file="", line=0, text=""), threads=stack.threads)))


def waits_for_ever(training: Training, rank: int) -> MachineStacks:
    """A look at which this rank waits in its collective."""

    def look() -> MachineStacks | None:
        taken = training.look()
        stack = training.texts(taken)[of_rank(taken, rank).posture.rank.stack]
        return taken if str(Activity.COLLECTIVE) in does(stack) else None

    return wait_for(f"rank {rank} to wait", look)


def test_training_goes_on_while_it_is_looked_at(training: Training) -> None:
    """Steps are finished between the order and the answer, by every rank."""

    def look() -> MachineStacks | None:
        before = training.steps()
        taken = training.look()
        after = training.steps()
        return taken if all(b > a for a, b in zip(before, after, strict=True)) else None

    taken = wait_for("steps during a look", look)
    assert [look.rank for look in taken.ranks] == [0, 1]
    assert [look.pid for look in taken.ranks] == [beat.pid for beat in training.beats()]
    for each in taken.ranks:
        assert each.posture.rank.stack
        (worker,) = each.posture.children
        assert (worker.role, worker.count) == (Role.LOADER, 1)
        assert worker.shown.stack
    assert not taken.remark
    texts = training.texts(taken)
    (worker,) = taken.ranks[0].posture.children
    assert "_worker_loop" in str(texts[worker.shown.stack])


def test_a_stopped_rank_shows_that_and_where_it_is_and_stays_stopped(training: Training) -> None:
    pid = training.beats()[1].pid
    os.kill(pid, signal.SIGSTOP)
    with resumed(pid):
        taken = waits_for_ever(training, 0)
        stopped, waiting = of_rank(taken, 1).posture.rank, of_rank(taken, 0).posture.rank
        assert stopped.state == "T"
        assert stopped.stack
        assert waiting.state in "RS"
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "T"


def test_a_rank_that_reads_what_never_comes_is_behind_in_the_flight_record(
    training: Training,
) -> None:
    training.ask(1, "read_an_answer")
    try:
        taken = waits_for_ever(training, 0)
        stack = training.texts(taken)[of_rank(taken, 1).posture.rank.stack]
        assert "read_an_answer" in does(stack)
        behind, waiting = stood_of(taken, 1), stood_of(taken, 0)
        assert behind.members == waiting.members == ((0, 1),)
        assert waiting.enqueued is not None
        assert behind.enqueued == waiting.enqueued - 1 == behind.completed
        ((number, call),) = waiting.calls
        assert (number, call.op, call.numel_in) == (waiting.enqueued, "all_reduce", 2)
    finally:
        training.answer()


def stood_of(taken: MachineStacks, rank: int) -> Stood:
    (found,) = [stood for stood in taken.stood if (rank, rank) in stood.ranks]
    return found


def test_a_rank_whose_interpreter_is_held_still_shows_everything(training: Training) -> None:
    training.ask(0, "hold_the_interpreter")
    try:
        taken = waits_for_ever(training, 1)
        stack = training.texts(taken)[of_rank(taken, 0).posture.rank.stack]
        assert "hold_the_interpreter" in does(stack)
        assert stood_of(taken, 0).enqueued == stood_of(taken, 0).completed
    finally:
        training.answer()


def test_a_stopped_loader_worker_is_seen_below_its_rank(training: Training) -> None:
    (pid,) = children(training.beats()[0].pid)
    os.kill(pid, signal.SIGSTOP)
    with resumed(pid):
        (worker,) = of_rank(training.look(), 0).posture.children
        assert (worker.role, worker.shown.state) == (Role.LOADER, "T")
        assert worker.shown.stack


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_frozen_rank_holds_up_no_look(training: Training) -> None:
    """In uninterruptible sleep, if this user may freeze; else at least in a sleep."""
    pid = training.beats()[1].pid
    with frozen(pid) as ice:
        taken = waits_for_ever(training, 0)
        shown = of_rank(taken, 1).posture.rank
        assert shown.state == ("D" if ice else "S")
        assert shown.stack


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[bool]:
    """Whether the freezer of control groups (v1) did it, or a stop after a sleep would have to."""
    group = FREEZER / f"everstep-looks-{os.getpid()}"
    if not os.access(FREEZER, os.W_OK):
        yield False
        return
    before = next(
        line.partition("freezer:")[2]
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        if ":freezer:" in line
    )
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        wait_for("ice", lambda: (group / "freezer.state").read_text() == "FROZEN\n")
        yield True
    finally:
        (group / "freezer.state").write_text("THAWED")
        (FREEZER / before.lstrip("/") / "cgroup.procs").write_text(str(pid))
        wait_for("an empty group", lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


@contextlib.contextmanager
def resumed(pid: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_neighbours_are_tried_and_a_stop_of_ranks_does_not_wait_for_a_look(
    training: Training,
) -> None:
    with deaf() as port, socket.create_server(("127.0.0.1", 0)) as listener:
        there = at("m1", listener.getsockname()[1])
        gone = at("m2", port)
        taken = training.look(neighbours=(there, gone))
        assert taken.unreached == ("m2",)
        assert len(taken.ranks) == 2
        order = training.order(neighbours=(gone,))
        training.controller.order(order)
        training.controller.stop_ranks(training.job.next_generation())
    empty = training.look()
    assert (empty.ranks, empty.stood) == ((), ())
    given_up = [each for each in training.controller.all(MachineStacks) if each.action == order.id]
    assert not given_up
    training.trains = False
    training.train()


def at(machine: str, port: int) -> AgentAt:
    return AgentAt(machine=MachineId(machine), address="127.0.0.1", port=port)


@contextlib.contextmanager
def deaf() -> Iterator[int]:
    """A port that takes no more connections and refuses none, like a machine that is cut off."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def test_a_child_that_takes_everything_apart_harms_no_rank(shared: Training) -> None:
    """It inherits the flight recorder's socket, and ends while the rank still listens to it."""
    shared.start(PARTED)
    wait_for("a step", lambda: shared.steps() == [0, 0])
    taken = shared.look()
    (stood,) = taken.stood
    assert (stood.ranks, stood.enqueued, stood.completed) == (((0, 1),), 1, 1)
    assert not taken.remark
    log = shared.job.machine.rank_log(taken.generation, taken.ranks[0].rank).read_text()
    assert not log, "neither a complaint nor torch's words about its server"
    shared.controller.stop_ranks(shared.job.next_generation())
    shared.trains = False
