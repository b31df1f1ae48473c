"""Promises of the agent: real keeper, agent, launcher and ranks; only the controller is small.

One machine serves all tests of this module; its ranks are programs without torch, started by
--no-python, so that nothing here waits for torch. test_training.py does the same with torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.actions import InjectFault, ReleaseMachine
from everstep.agent.memory import MemoryFile
from everstep.events import (
    FaultInjected,
    MachineJoined,
    MachineReleased,
    OutputLines,
    RankExited,
    StartFailed,
)
from everstep.model import ExitStatus, Fault, Generation, PolicySpec, Rank
from everstep.processes import Process, alive, read_pid_file
from everstep.sightings import MachineActivity
from everstep.trainer.heartbeat import Heartbeat, SlotReader
from tests.agent.fake_controller import MACHINE, FakeController
from tests.agent.support import Job, is_running, lines, wait_for


class Machine:
    """A whole machine and the controller it talks to."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.controllers: list[FakeController] = []
        self.generation = 0

    @property
    def controller(self) -> FakeController:
        return self.controllers[-1]

    def new_controller(self, term: int | None = None) -> FakeController:
        term = term or len(self.controllers) + 1
        controller = FakeController(self.job.paths, term, before=self.controllers[-1])
        self.controllers.append(controller)
        controller.get(MachineJoined)
        return controller

    def run(self, text: str) -> list[Heartbeat]:
        """The next generation runs this shell script; returns its slots."""
        self.job.script("rank.sh", text)
        self.generation += 1
        self.controller.start_ranks(self.generation)
        return self.slots()

    def slots(self) -> list[Heartbeat]:
        reader = SlotReader(self.job.shm / "heartbeat", 2)
        found = [beat for beat in reader.read() if beat is not None]
        reader.close()
        return [beat for beat in found if beat.generation == self.generation]

    def exits(self, generation: int | None = None) -> list[RankExited]:
        wanted = self.generation if generation is None else generation
        found = [e for c in self.controllers for e in c.all(RankExited)]
        return [event for event in found if event.generation == wanted]

    @contextlib.contextmanager
    def another_agent(self) -> Iterator[None]:
        """On leaving, waits until an agent has joined that was not there on entering."""
        known = {joined.agent for joined in self.controller.all(MachineJoined)}
        yield
        self.controller.get(MachineJoined, lambda joined: joined.agent not in known)


def wait_gone(beats: list[Heartbeat]) -> None:
    processes = [Process(beat.pid, beat.start_ticks) for beat in beats]
    wait_for("their end", lambda: not any(map(alive, processes)))


def make(root: Path, name: str) -> Machine:
    job = Job(root, f"{name}{os.getpid()}")
    job.describe(["sh", "rank.sh"], no_python=True)
    machine = Machine(job)
    controller = FakeController(job.paths)
    controller.policy = PolicySpec(quiet_s=1.0)
    machine.controllers.append(controller)
    job.start("agent", "launcher")
    controller.get(MachineJoined)
    return machine


def unmake(machine: Machine) -> None:
    machine.job.stop()
    machine.controller.stop()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    machine = make(tmp_path_factory.mktemp("agent"), "a")
    yield machine
    unmake(machine)


@pytest.fixture
def machine(shared: Machine) -> Iterator[Machine]:
    """The shared machine with a controller that has its attention, and nothing running after."""
    yield shared
    shared.generation += 1
    shared.controller.stop_ranks(shared.generation)


SLEEP = "exec sleep 1000"


def test_ranks_get_torchruns_environment_and_their_slots(machine: Machine) -> None:
    beats = machine.run('env | grep -v "^_=" | sort; exec sleep 1000')
    assert [beat.rank for beat in beats] == [0, 1]
    log = machine.job.machine.rank_log(Generation(machine.generation), Rank(1))
    wait_for("its environment", lambda: "WORLD_SIZE" in log.read_text())
    env = dict(line.split("=", 1) for line in lines(log))
    assert env["RANK"] == env["LOCAL_RANK"] == env["ROLE_RANK"] == "1"
    assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == env["ROLE_WORLD_SIZE"] == "2"
    assert (env["GROUP_RANK"], env["GROUP_WORLD_SIZE"]) == ("0", "1")
    assert env["MASTER_ADDR"] == "127.0.0.1"
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert env["TORCHELASTIC_RUN_ID"] == "job"
    assert env["OMP_NUM_THREADS"] == "1"
    assert "EVERSTEP_ATTACH" in env


def test_every_end_is_told_with_status_and_last_lines(machine: Machine) -> None:
    machine.run("if [ $RANK = 0 ]; then echo bad luck; exit 7; else kill -9 $$; fi")
    both = wait_for("both ends", lambda: machine.exits() if len(machine.exits()) == 2 else None)
    ends = {event.rank: event for event in both}
    assert ends[Rank(0)].exit == ExitStatus(code=7)
    assert ends[Rank(0)].last_lines == "bad luck\n"
    assert ends[Rank(1)].exit == ExitStatus(signal=9)
    assert all(0 <= event.age_s < 5 for event in both)


def test_output_comes_as_it_is_written(machine: Machine) -> None:
    machine.run("echo out $RANK; echo err $RANK >&2; exec sleep 1000")

    def said() -> list[OutputLines]:
        found = machine.controller.all(OutputLines)
        return [each for each in found if each.generation == machine.generation]

    wait_for("all output", lambda: sum(each.text.count("\n") for each in said()) == 4)
    by_rank = {rank: "".join(e.text for e in said() if e.rank == rank) for rank in (0, 1)}
    assert by_rank == {0: "out 0\nerr 0\n", 1: "out 1\nerr 1\n"}


def test_ranks_that_do_nothing_are_told_of_until_they_go_on(machine: Machine) -> None:
    """Their script is not attached."""
    machine.run(f"echo up; {SLEEP}")

    def told() -> list[MachineActivity]:
        found = machine.controller.all(MachineActivity)
        return [each for each in found if each.generation == machine.generation]

    (quiet,) = wait_for("that they are quiet", told)
    assert quiet.quiet_s >= 1.0
    assert quiet.idle_s is not None
    assert quiet.idle_s >= quiet.quiet_s
    with machine.job.machine.rank_log(quiet.generation, Rank(1)).open("a") as log:
        log.write("step 1\n")
    ended = wait_for("that they go on", lambda: [each for each in told() if each.quiet_s == 0])
    assert len(ended) == 1


def test_old_ranks_and_all_they_started_are_gone_before_a_stop_is_answered(
    machine: Machine,
) -> None:
    """Also what left its session, ignores SIGTERM, or lost its parent."""
    machine.run(
        """
        trap '' TERM
        sleep 1001 & echo $!
        setsid sleep 1002 & echo $!
        (setsid sh -c 'sleep 1003 & echo $!; wait' &)
        wait
        """
    )
    logs = [machine.job.machine.rank_log(Generation(machine.generation), Rank(r)) for r in (0, 1)]
    wait_for("all pids", lambda: all(len(lines(log)) == 3 for log in logs))
    pids = [int(line) for log in logs for line in lines(log)]
    pids += [beat.pid for beat in machine.slots()]
    assert all(is_running(pid) for pid in pids)
    machine.generation += 1
    machine.controller.stop_ranks(machine.generation)
    assert [pid for pid in pids if is_running(pid)] == []
    assert machine.exits(machine.generation - 1) == [], "an end that was ordered is no news"
    assert is_running(machine.job.pid("launcher"))


def test_grace_lets_ranks_end_by_themselves(machine: Machine) -> None:
    machine.run("trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.01; done")
    log = machine.job.machine.rank_log(Generation(machine.generation), Rank(0))
    wait_for("the trap", lambda: lines(log) == ["ready"])
    machine.generation += 1
    machine.controller.stop_ranks(machine.generation, grace_s=20)
    assert lines(log) == ["ready", "saved"]


def test_a_rank_that_ignores_sigterm_is_killed_after_its_grace(machine: Machine) -> None:
    beats = machine.run("trap '' TERM; echo ready; while :; do sleep 0.01; done")
    log = machine.job.machine.rank_log(Generation(machine.generation), Rank(0))
    wait_for("the trap", lambda: lines(log) == ["ready"])
    machine.generation += 1
    machine.controller.stop_ranks(machine.generation, grace_s=0.1)
    assert not any(is_running(beat.pid) for beat in beats)


def test_every_generation_gets_another_store_port(machine: Machine) -> None:
    ports = []
    for _ in range(3):
        machine.generation += 1
        ports.append(machine.controller.stop_ranks(machine.generation).store_port)
    assert len(set(ports)) == 3
    assert 0 not in ports


# --- kills of our own processes ------------------------------------------------------------------


def test_a_killed_agent_comes_back_adopts_its_ranks_and_goes_on_tailing(machine: Machine) -> None:
    beats = machine.run("echo one; until [ -e go ]; do sleep 0.01; done; echo two; exit 3")
    memory = MemoryFile(machine.job.shm)
    wait_for("the first lines", lambda: memory.read().shown == {0: 4, 1: 4})
    with machine.another_agent():
        os.kill(machine.job.pid("agent"), signal.SIGKILL)
    joined = machine.controller.all(MachineJoined)[-1]
    assert joined.generation == machine.generation
    assert {(s.rank, s.pid, s.exit) for s in joined.ranks} == {
        (beat.rank, beat.pid, None) for beat in beats
    }
    (machine.job.work / "go").touch()
    wait_for("both ends", lambda: len(machine.exits()) == 2)
    assert {event.exit for event in machine.exits()} == {ExitStatus(code=3)}
    wait_for("the last line", lambda: _text(machine).count("two\n") == 2)
    assert _text(machine).count("one\n") == 2, "nothing is shown twice"
    (machine.job.work / "go").unlink()


def _text(machine: Machine) -> str:
    found = [o for c in machine.controllers for o in c.all(OutputLines)]
    return "".join(each.text for each in found if each.generation == machine.generation)


def test_ends_while_no_agent_was_there_are_told_once(machine: Machine) -> None:
    """The agent is stopped first, so that it cannot see the ends; its successor reads them."""
    beats = machine.run("until [ -e go ]; do sleep 0.01; done; echo why; exit $((RANK + 5))")
    agent = machine.job.pid("agent")
    os.kill(agent, signal.SIGSTOP)
    (machine.job.work / "go").touch()
    wait_gone(beats)
    os.kill(agent, signal.SIGKILL)
    wait_for("both ends", lambda: len(machine.exits()) >= 2)
    assert {e.rank: e.exit.code for e in machine.exits()} == {0: 5, 1: 6}
    assert {e.last_lines for e in machine.exits()} == {"why\n"}
    memory = MemoryFile(machine.job.shm)
    wait_for("the acknowledgement", lambda: memory.read().told == [0, 1])
    with machine.another_agent():
        os.kill(machine.job.pid("agent", other_than=agent), signal.SIGKILL)
    joined = machine.controller.all(MachineJoined)[-1]
    assert {s.rank: s.exit for s in joined.ranks} == {
        0: ExitStatus(code=5),
        1: ExitStatus(code=6),
    }
    machine.controller.stop_ranks(machine.generation + 1)
    assert len(machine.exits()) == 2, "what was told and acknowledged is not told again"
    (machine.job.work / "go").unlink()


def test_a_killed_launcher_costs_no_rank_and_the_next_one_forks(machine: Machine) -> None:
    beats = machine.run(SLEEP)
    launcher = machine.job.pid("launcher")
    os.kill(launcher, signal.SIGKILL)
    machine.job.pid("launcher", other_than=launcher)
    assert all(is_running(beat.pid) for beat in beats)
    again = machine.run(SLEEP)
    assert {beat.pid for beat in again}.isdisjoint({beat.pid for beat in beats})


def test_a_start_while_the_launcher_is_dead_waits_for_the_next_one(machine: Machine) -> None:
    launcher = machine.job.pid("launcher")
    os.kill(launcher, signal.SIGKILL)
    assert len(machine.run(SLEEP)) == 2


def test_an_agent_killed_in_the_middle_of_a_start_leaves_nothing_unknown(machine: Machine) -> None:
    """Whatever was forked for the dead agent is found and ended by its successor."""
    machine.job.script("rank.sh", SLEEP)
    for _ in range(3):
        machine.generation += 1
        port = machine.controller.stop_ranks(machine.generation).store_port
        order = machine.controller.start_order(machine.generation, port)
        with machine.another_agent():
            machine.controller.order(order)
            os.kill(machine.job.pid("agent"), signal.SIGKILL)
        machine.generation += 1
        machine.controller.stop_ranks(machine.generation)
        assert _sleepers(machine) == []


def _sleepers(machine: Machine) -> list[int]:
    """Live processes whose working directory is the job's."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and is_running(int(entry.name)):
            try:
                words = (entry / "cmdline").read_bytes()
                there = str((entry / "cwd").readlink())
            except OSError:
                continue
            if there == str(machine.job.work) and b"launcher" not in words:
                found.append(int(entry.name))
    return found


def test_the_death_of_the_controller_stops_nothing_and_loses_no_report(machine: Machine) -> None:
    beats = machine.run("until [ -e go ]; do sleep 0.01; done; exit 4")
    machine.controller.stop()
    (machine.job.work / "go").touch()
    wait_gone(beats)
    agent = machine.job.pid("agent")
    controller = machine.new_controller()
    wait_for("both ends", lambda: len(controller.all(RankExited)) == 2)
    assert controller.hellos[-1].term == controller.term - 1
    assert machine.job.pid("agent") == agent
    assert machine.controller.stop_ranks(machine.generation + 1).generation > 0
    (machine.job.work / "go").unlink()


def test_a_controller_of_an_older_term_is_not_listened_to(machine: Machine) -> None:
    newest = machine.controller
    newest.stop()
    old = FakeController(machine.job.paths, term=newest.term - 1, before=newest)
    wait_for("the refusal", lambda: "fenced off" in machine.job.machine.log("agent").read_text())
    assert old.reports == []
    old.stop()
    machine.new_controller(newest.term + 1)


def test_a_wrong_token_is_one_clear_line(machine: Machine) -> None:
    term = machine.controller.term
    machine.controller.stop()
    wrong = FakeController(machine.job.paths, term=term, before=machine.controller)
    wrong.token = "another"
    log = machine.job.machine.log("agent")
    wait_for("the line", lambda: "refuses the token of" in log.read_text())
    assert wrong.hellos == []
    wrong.stop()
    machine.new_controller(term + 1)


# --- bad starts ----------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_named(machine: Machine) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        machine.generation += 1
        machine.controller.stop_ranks(machine.generation)
        order = machine.controller.start_order(machine.generation, port)
        machine.controller.order(order)
        failed = machine.controller.get(StartFailed, lambda report: report.action == order.id)
    assert f"port {port}" in failed.reason


# --- faults and the end --------------------------------------------------------------------------


def fault(kind: Fault, rank: int | None = None) -> InjectFault:
    return InjectFault(
        id=f"fault-{kind}-{rank}",
        cause="test",
        why="a test",
        fault=kind,
        machine=MACHINE,
        rank=None if rank is None else Rank(rank),
    )


def test_the_fault_kill_rank_kills_that_rank(machine: Machine) -> None:
    machine.run(SLEEP)
    machine.controller.order(fault(Fault.KILL_RANK, rank=1))
    ended = wait_for("its end", machine.exits)
    assert [(event.rank, event.exit) for event in ended] == [(1, ExitStatus(signal=9))]
    assert machine.controller.all(FaultInjected)


@pytest.mark.parametrize("kind", [Fault.KILL_AGENT, Fault.KILL_LAUNCHER])
def test_faults_of_our_own_processes_are_told_before_they_happen(
    machine: Machine, kind: Fault
) -> None:
    service = str(kind).removeprefix("kill-")
    beats = machine.run(SLEEP)
    before = machine.job.pid(service)
    with machine.another_agent() if kind is Fault.KILL_AGENT else contextlib.nullcontext():
        machine.controller.order(fault(kind))
        machine.controller.get(FaultInjected, lambda report: report.fault == kind)
    machine.job.pid(service, other_than=before)
    assert all(is_running(beat.pid) for beat in beats)


def test_losing_the_machine_leaves_nothing_of_it(tmp_path: Path) -> None:
    machine = make(tmp_path, "lose")
    beats = machine.run(SLEEP)
    pids = [machine.job.pid(name) for name in ("agent", "launcher")]
    machine.controller.order(fault(Fault.LOSE_MACHINE))
    machine.controller.get(FaultInjected)
    assert machine.job.keeper is not None
    assert machine.job.keeper.wait(90) == -signal.SIGKILL
    everyone = [*pids, *(beat.pid for beat in beats)]
    wait_for("their end", lambda: not any(is_running(pid) for pid in everyone))
    assert not machine.job.shm.exists()
    unmake(machine)


def test_a_released_machine_says_so_last_and_leaves_nothing(tmp_path: Path) -> None:
    machine = make(tmp_path, "leave")
    beats = machine.run(SLEEP)
    pids = [machine.job.pid(name) for name in ("agent", "launcher")]
    machine.controller.order(ReleaseMachine(id="r1", cause="test", why="a test", machine=MACHINE))
    released = machine.controller.get(MachineReleased)
    assert released.action == "r1"
    assert machine.controller.reports[-1] == released
    assert machine.job.keeper is not None
    assert machine.job.keeper.wait(90) == 0
    assert not any(is_running(pid) for pid in [*pids, *(beat.pid for beat in beats)])
    assert not machine.job.shm.exists()
    assert not machine.job.machine.pid_file("keeper").exists()
    unmake(machine)


def test_a_killed_keeper_leaves_ranks_training_and_their_status_unknown(tmp_path: Path) -> None:
    machine = make(tmp_path, "orphan")
    beats = machine.run("sleep 1000 & wait")
    assert machine.job.keeper is not None
    machine.job.keeper.kill()
    machine.job.keeper.wait()
    assert all(is_running(beat.pid) for beat in beats)
    os.kill(beats[0].pid, signal.SIGKILL)
    ended = wait_for("its end", machine.exits)
    assert ended[0].exit == ExitStatus()
    machine.controller.order(ReleaseMachine(id="r1", cause="t", why="a test", machine=MACHINE))
    machine.controller.get(MachineReleased)
    wait_for("all gone", lambda: _sleepers(machine) == [])
    files = [machine.job.machine.pid_file(name) for name in ("agent", "launcher")]
    wait_for("the services' end", lambda: not any(map(read_pid_file, files)))
    unmake(machine)
