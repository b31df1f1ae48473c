"""Checks in a real agent under a real keeper: what the controller is told, whoever was killed."""

from __future__ import annotations

import os
import signal
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep import wire
from everstep.actions import SendStacks, TestMachine
from everstep.agent.checking import usable_checks
from everstep.agent.checks import registry
from everstep.agent.checks.kernel.kmsg import boot_id
from everstep.agent.checks.memory import Kept, KeptChild
from everstep.diagnosis.words import Verdict
from everstep.events import (
    AlertCleared,
    AlertRaised,
    EvidenceFound,
    MachineJoined,
    MachineTested,
)
from everstep.model import ChecksSpec, MachineId
from everstep.processes import alive
from everstep.sightings import StacksSent
from tests.agent.checks.parts import PidCheck, WordsCheck
from tests.agent.fake_controller import MACHINE, FakeController
from tests.agent.support import Job, wait_for

ROOT = Path(__file__).parents[2]
FREEZER = Path("/sys/fs/cgroup/freezer")


class Machine:
    """A job of one machine, its controller, and the files that its checks look at."""

    def __init__(self, root: Path, protocol: int, checks: ChecksSpec) -> None:
        self.root = root
        self.job = Job(root, f"checks{os.getpid()}")
        self.job.describe(["sh", "-c", "exec sleep 1000"], no_python=True, checks=checks)
        self.write("mood", "answer")
        self.controller = FakeController(self.job.paths, protocol=protocol)
        self.job.start("agent", "launcher", agent="tests.agent.checks.agent_with_checks")
        self.controller.get(MachineJoined)

    def write(self, name: str, text: str) -> None:
        beside = self.root / f"{name}.new"
        beside.write_text(text)
        beside.replace(self.root / name)

    def raised(self, check: str) -> list[AlertRaised]:
        return [e for e in self.controller.all(AlertRaised) if e.alert.result.check == check]

    def child(self) -> KeptChild | None:
        """The one of the source that may hang, once it has answered."""
        try:
            content = (self.job.shm / "checks").read_bytes()
        except OSError:
            return None
        kept = msgspec.msgpack.decode(content, type=Kept)
        return kept.children.get("moody") if "moody" in kept.histories else None

    def kill_agent(self) -> None:
        """And wait for the next one."""
        known = {joined.agent for joined in self.controller.all(MachineJoined)}
        os.kill(self.job.pid("agent"), signal.SIGKILL)
        self.controller.get(MachineJoined, lambda joined: joined.agent not in known)


Make = Callable[..., Machine]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")
    monkeypatch.setenv("TEST_ROOT", str(tmp_path))
    made: list[Machine] = []

    def one(protocol: int = wire.PROTOCOL, **checks: Any) -> Machine:
        made.append(Machine(tmp_path, protocol, ChecksSpec(**checks)))
        return made[-1]

    yield one
    for machine in made:
        machine.job.stop()
        machine.controller.stop()


def test_a_controller_is_told_what_fails_and_what_is_over(make: Make) -> None:
    machine = make()
    joined = machine.controller.get(MachineJoined)
    assert joined.boot_id == boot_id()
    assert joined.units == ("switch:leaf7",)
    machine.write("words", "eth0 info\neth1 evict")
    raised = machine.controller.get(AlertRaised)
    assert (raised.alert.result.check, raised.alert.result.item) == ("test.words", "eth1")
    assert (raised.machine, raised.alert.source) == ("m0", "agent")
    machine.write("words", "eth0 info\neth1 info")
    assert machine.controller.get(AlertCleared).item == "eth1"
    machine.write("words", "defect")
    wait_for(
        "a line of the defect", lambda: "defective" in machine.job.machine.log("agent").read_text()
    )
    assert len(machine.controller.all(AlertRaised)) == 1


def test_a_killed_agent_hides_nothing_and_repeats_nothing_as_news(make: Make) -> None:
    machine = make()
    machine.write("words", "eth0 info\neth1 warn")
    machine.controller.get(AlertRaised)
    machine.kill_agent()
    again = wait_for("the alert again", lambda: machine.raised("test.words")[1:])
    assert again[0].alert.age_s > 0
    machine.write("words", "eth0 warn\neth1 warn")
    machine.controller.get(AlertRaised, lambda event: event.alert.result.item == "eth0")
    assert [e.alert.result.item for e in machine.raised("test.words")] == ["eth1", "eth1", "eth0"]


@pytest.fixture
def freeze() -> Iterator[Callable[[int], None]]:
    """Freezes a process so that no signal ends it, as one that hangs in a driver."""
    group = FREEZER / f"everstep-checking-{os.getpid()}"
    group.mkdir()

    def one(pid: int) -> None:
        (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        wait_for("ice", lambda: (group / "freezer.state").read_text().strip() == "FROZEN")

    yield one
    (group / "freezer.state").write_text("THAWED")
    wait_for("an empty group", lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def test_a_child_that_hangs_for_ever_is_told_and_holds_up_nothing(
    make: Make, freeze: Callable[[int], None]
) -> None:
    """Not even the proof that old ranks are gone, after its agent was killed beside it."""
    machine = make()
    first = wait_for("a child", machine.child)
    freeze(first.pid)
    raised = machine.controller.get(AlertRaised)
    assert (raised.alert.result.check, raised.alert.result.verdict) == ("test.mood", Verdict.EVICT)
    machine.controller.start_ranks(1)
    machine.kill_agent()
    machine.controller.stop_ranks(2)
    wait_for("the alert again", lambda: machine.raised("test.mood")[1:])
    kept = machine.child()
    assert kept is not None
    assert kept.process == first.process, "there is no second one"
    assert alive(first.process)
    (FREEZER / f"everstep-checking-{os.getpid()}" / "freezer.state").write_text("THAWED")

    def next_child() -> bool:
        now = machine.child()
        return now is not None and now.process != first.process

    wait_for("the next child", next_child)
    assert not alive(first.process)


def test_a_controller_of_the_former_protocol_is_spared_what_it_does_not_know(make: Make) -> None:
    machine = make(protocol=wire.PROTOCOL - 1)
    machine.controller.order(
        SendStacks(id="7", cause="6", why="test", machine=MACHINE, look=1, stacks=())
    )
    instead = machine.controller.get(EvidenceFound)
    assert (instead.findings, instead.generation) == ((), 0)
    assert machine.controller.start_ranks(1), "and the session goes on"
    assert machine.controller.all(StacksSent) == []


def test_checks_that_are_off_look_at_nothing(make: Make) -> None:
    machine = make(on=False)
    machine.write("words", "eth1 evict")
    machine.controller.start_ranks(1)
    machine.controller.stop_ranks(2)
    assert machine.child() is None
    assert machine.controller.all(AlertRaised) == []


def test_the_agent_shows_its_checks_to_prometheus(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    machine = make(metrics_port=port)
    machine.write("words", "eth1 evict")
    machine.controller.get(AlertRaised)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert 'everstep_check{check="test.words",item="eth1"} 5\n' in text
    assert 'everstep_check_samples_total{source="words"}' in text


# --- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "names"),
    [
        ({}, ["test.words", "test.pid"]),
        ({"test.words": {"off": True}}, ["test.pid"]),
        ({"test.words": {"at_most": "warn"}}, ["test.words", "test.pid"]),
        ({"test.words": {"new_limit": 3}}, ["test.pid"]),
        ({"test.words": {"at_most": 3}}, ["test.pid"]),
        ({"test.gone": {"off": True}}, ["test.words", "test.pid"]),
    ],
)
def test_limits_of_another_version_never_loosen_a_check(
    limits: dict[str, dict[str, Any]], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = {check.name: check for check in (WordsCheck, PidCheck)}
    monkeypatch.setattr(registry, "CHECKS", checks)
    monkeypatch.setattr("everstep.agent.checking.CHECKS", checks)
    assert [check.name for check in usable_checks(ChecksSpec(limits=limits))] == names
    assert usable_checks(ChecksSpec(on=False, limits=limits)) == []


def test_a_machine_is_tested_when_it_is_asked(make: Make) -> None:
    machine = make(protocol=wire.PROTOCOL)
    machine.write("words", "eth0 warn")
    machine.controller.get(AlertRaised)
    assert _tested(machine, 1).passed
    machine.write("words", "eth0 evict")
    failed = _tested(machine, 2)
    assert failed.passed is False
    assert "test.words says of eth0" in failed.why


def _tested(machine: Machine, attempt: int) -> MachineTested:
    order = TestMachine(
        id=f"test-{attempt}",
        cause="test",
        why="a test",
        machine=MachineId("m0"),
        attempt=attempt,
        within_s=60.0,
    )
    machine.controller.order(order)
    return machine.controller.get(MachineTested, lambda told: told.action == order.id)
