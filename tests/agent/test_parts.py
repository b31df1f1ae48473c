"""Promises of the agent's small parts: exits, output, port, memory, environment, adoption."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from everstep.actions import StartRanks
from everstep.agent import log_findings, output
from everstep.agent.adoption import adopt
from everstep.agent.exits import LAST_LINES_MAX, TRACEBACK_MAX, Exits, last_lines, read_error
from everstep.agent.log_findings import LogFindings
from everstep.agent.log_numbers import LogNumbers
from everstep.agent.memory import Memory, MemoryFile
from everstep.agent.output import Output, Tail, free_beginning
from everstep.agent.port import PortTaken, StorePort
from everstep.agent.progress import Progress
from everstep.agent.rank_env import fork_request
from everstep.agent.this_machine import ThisMachine
from everstep.events import OutputLines
from everstep.files import FileUnreadable
from everstep.model import ExitStatus, Generation, MachineId, NodeRank, Rank, Step, Term
from everstep.processes import Process, identify
from everstep.sightings import BadNumber, Numbers
from everstep.trainer.context import VARIABLE, AttachContext
from everstep.trainer.heartbeat import Heartbeat, SlotWriter
from tests.agent.support import Job


@pytest.fixture
def here(tmp_path: Path) -> ThisMachine:
    job = Job(tmp_path, f"parts{os.getpid()}")
    job.describe(["train.py", "--lr", "1"], nnodes=2, env={"USER_SET": "1"})
    return ThisMachine.read(job.machine.setup)._replace(shm=tmp_path / "shm")


# --- exits ---------------------------------------------------------------------------------------


def test_exits_are_read_on_as_the_file_grows(tmp_path: Path) -> None:
    path = tmp_path / "exits"
    exits = Exits(path)
    assert exits.of(Process(10, 5)) is None
    path.write_text(f"10 5 {7 << 8}\n11 6 9\nnonsense\n12 7 13")
    assert exits.of(Process(10, 5)) == ExitStatus(code=7)
    assert exits.of(Process(11, 6)) == ExitStatus(signal=9)
    assert exits.of(Process(12, 7)) is None, "a line without its end is not there yet"
    assert exits.of(Process(10, 6)) is None, "another process that had the same pid"
    with path.open("a") as file:
        file.write("9\n12 8 0\n")
    assert exits.of(Process(12, 7)) == ExitStatus(signal=139 & 0x7F)
    assert exits.of(Process(12, 8)) == ExitStatus(code=0)


def test_error_files_of_torch_and_of_its_cpp_code_are_read(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    assert read_error(path) is None
    long = "x" * TRACEBACK_MAX + "innermost"
    extra = {"py_callstack": long, "timestamp": "1"}
    path.write_text(json.dumps({"message": {"message": "KeyError: 'a: b'", "extraInfo": extra}}))
    error = read_error(path)
    assert error is not None
    assert (error.kind, error.message) == ("KeyError", "'a: b'")
    assert len(error.traceback) == TRACEBACK_MAX
    assert error.traceback.endswith("innermost")
    path.write_text(json.dumps({"message": "a C++ exception"}))
    error = read_error(path)
    assert error is not None
    assert (error.kind, error.message, error.traceback) == ("", "a C++ exception", "")
    for torn in ("", "{", '{"message": 7}', '{"message": {"message"'):
        path.write_text(torn)
        assert read_error(path) is None


def test_last_lines_are_whole_and_bounded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_lines(log) == ""
    log.write_text("one\ntwo")
    assert last_lines(log) == "one\ntwo"
    log.write_text("".join(f"line {n}\n" for n in range(2000)))
    end = last_lines(log)
    assert len(end) <= LAST_LINES_MAX
    assert end.startswith("line ")
    assert end.endswith("line 1999\n")
    log.write_bytes(b"\xff" * 10)
    assert last_lines(log) == "\ufffd" * 10


# --- output --------------------------------------------------------------------------------------


def test_a_line_is_shown_when_it_is_ended_or_has_not_grown(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tail = Tail(log, 0)
    assert tail.read() == (b"", 0)
    log.write_bytes(b"whole\nhal")
    assert tail.read() == (b"whole\n", 0)
    assert tail.read() == (b"", 0)
    assert tail.read() == (b"hal", 0)
    assert tail.read() == (b"", 0)
    with log.open("ab") as file:
        file.write(b"f\r 50 %\r")
    assert tail.read() == (b"f\r 50 %\r", 0), "progress bars end their lines so"


def test_a_reader_far_behind_skips_and_counts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"0123456789abcde\n" * (output.BEHIND_BYTES_MAX // 16 + 1))
    tail = Tail(log, 0)
    text, skipped = tail.read()
    assert len(text) == output.SENT_BYTES_MAX
    assert skipped == log.stat().st_size - output.SENT_BYTES_MAX
    assert tail.read() == (b"", 0)


def test_logs_are_bounded_on_disk_and_stay_readable(
    here: ThisMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer's own descriptor goes on appending, and offsets keep their meaning."""
    monkeypatch.setattr(output, "_SLACK_BYTES", 1 << 16)
    monkeypatch.setattr(output, "KEPT_BYTES", 1 << 20)
    log = here.paths.rank_log(Generation(1), Rank(0))
    log.parent.mkdir(parents=True)
    follower = Output(here)
    follower.follow(Generation(1), [Rank(0)], {Rank(0): 4 << 20})
    with log.open("ab", buffering=0) as rank:
        rank.write(b"x" * (4 << 20))
        follower.bound()
        rank.write(b"after\n")
    assert log.stat().st_size == (4 << 20) + 6
    assert log.stat().st_blocks * 512 <= (1 << 20) + (1 << 16)
    assert [lines.text for lines in follower.read()] == ["after\n"]


def test_a_file_system_without_holes_empties_the_file(tmp_path: Path) -> None:
    """A file opened by a rank for appending goes on from its new end."""
    log = tmp_path / "log"
    tail = Tail(log, 0)
    with log.open("ab", buffering=0) as rank:
        rank.write(b"x" * 100 + b"\n")
        assert tail.read()[0]
        log.write_bytes(b"")  # what free_beginning does where fallocate is refused
        rank.write(b"after\n")
    assert tail.read() == (b"after\n", 0)
    with pytest.raises(OSError, match="No such file") as missing:
        free_beginning(tmp_path / "none", 10)
    assert missing.value.errno == errno.ENOENT


def test_logs_of_old_generations_go(here: ThisMachine) -> None:
    for generation in (1, 5, 30):
        log = here.paths.rank_log(Generation(generation), Rank(0))
        log.parent.mkdir(parents=True)
        log.write_text("x")
    follower = Output(here)
    follower.follow(Generation(30), [Rank(0)], {})
    follower.bound()
    assert sorted(path.name for path in here.paths.ranks.iterdir()) == ["30"]


# --- port ----------------------------------------------------------------------------------------


@pytest.fixture
def port() -> Iterator[StorePort]:
    port = StorePort()
    yield port
    port.close()


def test_a_held_port_is_no_strangers_but_can_be_listened_on(port: StorePort) -> None:
    number = port.reserve_fresh()
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", number))
    with socket.socket(socket.AF_INET6) as store:
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("::", number))
        store.listen()
        with socket.create_connection(("127.0.0.1", number)):
            assert port.number == number
        with pytest.raises(PortTaken, match=str(number)):
            StorePort().hold(number)
    assert port.reserve_fresh() != number


def test_a_successor_holds_the_same_port(port: StorePort) -> None:
    number = port.reserve_fresh()
    successor = StorePort()
    successor.hold(number)
    assert successor.number == number
    successor.close()


# --- memory and adoption -------------------------------------------------------------------------


def test_memory_is_blank_when_lost_or_torn(tmp_path: Path) -> None:
    file = MemoryFile(tmp_path / "shm")
    assert file.read() == Memory()
    kept = Memory(term=Term(3), generation=Generation(7), told=[Rank(1)], shown={Rank(0): 10})
    file.write(kept)
    assert MemoryFile(tmp_path / "shm").read() == kept
    (tmp_path / "shm" / "agent").write_bytes(b"{torn")
    assert file.read() == Memory()


def beat(rank: int, generation: int, process: Process) -> Heartbeat:
    return Heartbeat(
        rank=rank, generation=generation, pid=process.pid, start_ticks=process.start_ticks
    )


def test_adoption_takes_what_runs_and_what_is_news() -> None:
    me = identify(os.getpid())
    assert me is not None
    gone = Process(me.pid, me.start_ticks + 1)
    beats = [beat(0, 4, me), beat(1, 4, gone), beat(2, 4, gone), beat(3, 3, gone), beat(4, 3, me)]
    memory = Memory(generation=Generation(4), told=[Rank(2)])
    adoption = adopt(beats, memory, lambda _: ExitStatus(code=1))
    assert adoption.event.generation == 4
    assert {s.rank: s.exit for s in adoption.event.ranks} == {
        0: None,
        1: None,
        2: ExitStatus(code=1),
        4: None,
    }
    assert [w.rank for w in adoption.watch] == [0, 1, 4]
    newer = adopt(beats, Memory(generation=Generation(5)), lambda _: ExitStatus())
    assert newer.event.generation == 5
    assert [s.rank for s in newer.event.ranks] == [0, 4], "running though ordered to end"


def test_progress_is_of_one_generation_and_of_all_ranks(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "heartbeat", 2)
    assert progress.read(Generation(1)) is None
    for rank, step in ((0, 7), (1, 9)):
        slot = SlotWriter(tmp_path / "heartbeat", rank)
        own = Heartbeat(generation=1, rank=rank, pid=1, start_ticks=1, step=step, attached=True)
        own.loss, own.step_s, own.at_ns = (2.5, 0.1, 5) if rank else (float("nan"), 0.2, 3)
        slot.write(own)
        slot.close()
    seen = progress.read(Generation(1))
    assert seen is not None
    assert (seen.slowest, seen.fastest, seen.step_s, seen.loss) == (7, 9, 0.2, 2.5)
    assert progress.read(Generation(2)) is None
    assert progress.finished(Generation(2), 1_000_000_003) == (7, 1.0)
    assert progress.finished(Generation(1), 10) == (-1, 0.0)


def test_numbers_are_of_the_first_rank_that_has_a_loss_and_the_first_bad_one_of_all(
    tmp_path: Path,
) -> None:
    progress = Progress(tmp_path / "heartbeat", 2)
    assert progress.numbers(Generation(1)) is None
    for rank, loss, bad in ((0, float("nan"), 9), (1, 2.5, 6)):
        slot = SlotWriter(tmp_path / "heartbeat", rank)
        own = Heartbeat(generation=1, rank=rank, pid=1, start_ticks=1, step=9, attached=True)
        own.loss, own.step_s, own.bad_step = loss, 0.5, bad
        slot.write(own)
        slot.close()
    told = progress.numbers(Generation(1))
    assert told is not None
    assert told.numbers == (Numbers(step=Step(9), loss=2.5, speed=2.0),)
    assert told.bad == BadNumber(rank=Rank(1), step=Step(6))
    again = progress.numbers(Generation(1))
    assert again is not None
    assert again.numbers == (), "a step is told once"


def printed(text: str, rank: int = 0, generation: int = 1) -> OutputLines:
    return OutputLines(
        machine=MachineId("m0"), rank=Rank(rank), generation=Generation(generation), text=text
    )


def test_logs_of_scripts_that_are_not_attached_tell_numbers_too() -> None:
    logs = LogNumbers()
    logs.read(printed("step 1 loss 2.5\nhello\nstep 2 loss nan grad_norm 1.0\n"))
    logs.read(printed("step 1 loss 9.9\n", rank=1))
    told = logs.take(Generation(1))
    assert told is not None
    assert (told.rank, told.logged) == (0, True)
    assert [(n.step, n.grad_norm) for n in told.numbers] == [(1, None), (2, 1.0)]
    assert logs.take(Generation(1)) is None
    logs.read(printed("step 3 loss 2.5\n", generation=2))
    assert logs.take(Generation(1)) is None
    assert logs.take(Generation(2)) is not None


# --- what ranks get ------------------------------------------------------------------------------

ORDER = StartRanks(
    id="1",
    cause="1",
    why="test",
    machine=MachineId("m0"),
    generation=Generation(3),
    node_rank=NodeRank(1),
    master_addr="127.0.0.10",
    master_port=4711,
    restore=Step(12),
    restore_generation=Generation(2),
    restarts=2,
)


def test_a_rank_gets_torchruns_variables_and_its_identity(here: ThisMachine) -> None:
    request = fork_request(here, ORDER, Term(5), {})
    assert request.command == ("train.py", "--lr", "1")
    assert [(plan.rank, plan.slot) for plan in request.ranks] == [(2, 0), (3, 1)]
    env = dict(request.ranks[1].env)
    context = msgspec.json.decode(env.pop(VARIABLE), type=AttachContext)
    assert (context.rank, context.local_rank, context.world_size) == (3, 1, 4)
    assert (context.generation, context.term) == (3, 5)
    assert (context.restore, context.restore_generation) == (12, 2)
    assert env == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.10",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": str(here.paths.error_file(Generation(3), Rank(3))),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "OMP_NUM_THREADS": "1",
    }


def test_what_the_user_has_set_is_left_alone(here: ThisMachine) -> None:
    base = {"OMP_NUM_THREADS": "8", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    for recorder in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        told = {**base, recorder: "0"}
        env = fork_request(here, ORDER, Term(1), told).ranks[0].env
        assert told.keys().isdisjoint(env)
        assert "TORCH_FR_BUFFER_SIZE" not in env


def test_a_setup_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileUnreadable, match=r"machine\.json"):
        ThisMachine.read(tmp_path / "machine.json")


# --- findings ------------------------------------------------------------------------------------


def test_what_was_prepared_costs_the_first_line_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = LogFindings(MachineId("m0"), 1)
    findings.prepare()

    def again(*_: object) -> None:
        raise AssertionError("the patterns are made again")

    monkeypatch.setattr(log_findings, "Patterns", again)
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    line = OutputLines(machine=MachineId("m0"), rank=Rank(0), generation=Generation(1), text=text)
    assert findings.read(line) is not None
