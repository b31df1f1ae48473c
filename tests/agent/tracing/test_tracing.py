"""Promises of a look at single processes: fallbacks, time limits, children, and bounds.

Real processes, real py-spy; those that hang or fail are shell scripts.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.actions import CollectStacks, SendStacks
from everstep.agent.this_machine import ThisMachine
from everstep.agent.tracing import recorder, signalled
from everstep.agent.tracing.bounds import ANSWER_CHARS_MAX, FRAMES_MAX, STACK_CHARS_MAX, bounded
from everstep.agent.tracing.spy import Spy, find
from everstep.agent.tracing.tracer import LOOKS_KEPT, Tracer
from everstep.agent.watch import Watched
from everstep.diagnosis.frames import Frame, Thread
from everstep.looks import Posture, Role, Stack
from everstep.model import Generation, MachineId, Rank
from everstep.processes import Process, identify
from everstep.sightings import MachineStacks
from everstep.trainer import dumping
from everstep.trainer.recording import NamedGroup, Recorder
from tests.agent.support import Job, is_running, lines, wait_for

GENERATION = Generation(1)
NOBODY = 65534
SEIZE = 0x4206
"""Of ptrace: become its debugger, and let it run."""
REGISTER = """
    import sys
    from pathlib import Path
    from everstep.trainer import dumping
    dumping.register(Path(sys.argv[1]), 0)
"""
READS = """
    import os
    def read_an_answer():
        print("ready", flush=True)
        os.read(0, 1)
    read_an_answer()
"""
USES_IT = f"""
    import signal
    signal.signal({int(dumping.SIGNAL)}, lambda *_: print("woken", flush=True))
"""
HOLDS_BACK = f"""
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, [{int(dumping.SIGNAL)}])
"""
HOLDS = """
    import ctypes
    def hold_the_interpreter():
        print("ready", flush=True)
        ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)
    hold_the_interpreter()
"""


class Scene:
    """A machine whose one rank is whatever the test starts."""

    def __init__(self, root: Path) -> None:
        self.job = Job(root, f"s{os.getpid()}")
        self.job.describe(["x.py"], nproc_per_node=1)
        self.job.shm.mkdir(parents=True)
        self.here = ThisMachine.read(self.job.machine.setup)
        self.root = root
        self._started: list[subprocess.Popen[str]] = []
        self.rank: Process | None = None
        self.held: Process | None = None
        """A second rank."""

    def python(self, *parts: str) -> subprocess.Popen[str]:
        """Start the rank with this program, and wait until it says that it is ready."""
        script = self.root / "rank.py"
        script.write_text("".join(map(textwrap.dedent, parts)))
        return self.start(sys.executable, str(script), str(self.job.shm))

    def start(self, *argv: str) -> subprocess.Popen[str]:
        rank = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._started.append(rank)
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        self.rank = identify(rank.pid)
        return rank

    def running(self) -> list[Watched]:
        assert self.rank is not None
        held = [] if self.held is None else [Watched(Rank(1), GENERATION, self.held)]
        return [Watched(Rank(0), GENERATION, self.rank), *held]

    def tracer(self, program: str | None = None) -> Tracer:
        return Tracer(self.here, self.running, None if program is None else Spy(program))

    def look(self, program: str | None = None, **fields: Any) -> tuple[MachineStacks, list[Stack]]:
        """One look, and the texts of the rank's stack and its children's."""
        tracer = self.tracer(program)
        taken = asyncio.run(tracer.take(order(**fields)))
        (look,) = taken.ranks
        wanted = [look.posture.rank.stack, *(c.shown.stack for c in look.posture.children)]
        asked = SendStacks(
            id="2", cause="", why="", machine=taken.machine, look=1, stacks=tuple(wanted)
        )
        return taken, list(tracer.give(asked).stacks)

    def program(self, text: str) -> str:
        """A py-spy that does this."""
        path = self.root / "py-spy"
        path.write_text(f"#!/bin/sh\n{textwrap.dedent(text)}")
        path.chmod(0o755)
        return str(path)

    def close(self) -> None:
        for rank in self._started:
            for stream in (rank.stdin, rank.stdout):
                assert stream is not None
                stream.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
        shutil.rmtree(self.job.shm)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.close()


def order(**fields: Any) -> CollectStacks:
    whole = {"within_s": 30.0, "native": False, "look": 1, "generation": GENERATION, **fields}
    return CollectStacks(id="1", cause="", why="", machine=MachineId("m0"), **whole)


def posture(taken: MachineStacks) -> Posture:
    return taken.ranks[0].posture


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


# --- where py-spy may not look -------------------------------------------------------------------


def ordinary(scene: Scene) -> str:
    """py-spy as a user who may not look into our processes, if we can be one; else its words."""
    if os.geteuid() == 0:
        user = f"--reuid={NOBODY} --regid={NOBODY} --clear-groups"
        return scene.program(f'exec setpriv {user} {shlex.quote(str(find()))} "$@"')
    return scene.program("echo Permission Denied: Try running again >&2; exit 1")


@pytest.mark.parametrize("program", [READS, HOLDS])
def test_a_rank_writes_its_stack_itself_where_py_spy_may_not_look(
    scene: Scene, program: str
) -> None:
    """It is the same by its fingerprint, also while a function of C holds the interpreter."""
    scene.python(REGISTER, program)
    taken, _ = scene.look()
    denied, (stack,) = scene.look(ordinary(scene))
    assert not taken.remark
    assert "py-spy may not look into processes" in denied.remark
    assert posture(denied).rank.stack == posture(taken).rank.stack != ""
    (thread,) = stack.threads
    assert thread.main
    assert thread.frames[0].name in {"read_an_answer", "hold_the_interpreter"}
    missing, _ = scene.look("/nowhere/py-spy")
    assert posture(missing).rank.stack == posture(taken).rank.stack


def test_its_own_faulthandler_goes_on_beside_ours(scene: Scene) -> None:
    rank = scene.python(
        "import faulthandler, signal, sys",
        "\nfaulthandler.enable(file=open('/dev/null', 'w'))",
        "\nfaulthandler.register(signal.SIGUSR1, file=open(sys.argv[1] + '/theirs', 'w'))\n",
        REGISTER,
        READS,
    )
    scene.look(ordinary(scene))
    theirs = scene.job.shm / "theirs"
    assert not theirs.read_text()
    rank.send_signal(signal.SIGUSR1)
    wait_for("its own stacks", lambda: "read_an_answer" in theirs.read_text())


@pytest.mark.parametrize(
    "parts",
    [(READS,), (USES_IT, REGISTER, READS), (REGISTER, HOLDS_BACK, READS)],
    ids=["it never heard of the signal", "it uses the signal itself", "it holds it back"],
)
def test_no_process_gets_a_signal_that_is_not_for_this(
    scene: Scene, parts: tuple[str, ...]
) -> None:
    rank = scene.python(*parts)
    taken, stacks = scene.look(ordinary(scene))
    assert not stacks
    assert "py-spy may not look into processes" in posture(taken).rank.why_none
    assert is_running(rank.pid)
    pending = f"ShdPnd:\t{0:016x}"
    assert pending in Path(f"/proc/{rank.pid}/status").read_text()
    assert rank.stdin is not None
    assert rank.stdout is not None
    rank.stdin.write("y")
    rank.stdin.flush()
    assert not rank.stdout.read(), "it was not woken"
    assert rank.wait() == 0


def test_a_child_that_may_be_about_to_become_another_program_is_left_alone(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it has its parent's handler; from then on it would die of the signal."""
    scene.python(REGISTER, "import os, signal\nif os.fork() == 0: signal.pause()\n", READS)
    monkeypatch.setattr(signalled, "YOUNG_S", 1e9)
    again, (stack,) = scene.look(ordinary(scene))
    assert stack.threads[0].frames[0].name == "read_an_answer", "the rank is asked"
    (child,) = posture(again).children
    assert "py-spy may not look into processes" in child.shown.why_none
    monkeypatch.setattr(signalled, "YOUNG_S", 0.0)
    taken, stacks = scene.look(ordinary(scene))
    assert len(stacks) == 2
    assert posture(taken).children[0].shown.stack


# --- time limits ---------------------------------------------------------------------------------


def hanging(scene: Scene, *first: str) -> str:
    """A py-spy that says its pid and never answers."""
    return scene.program("\n".join(["echo $$ >> $(dirname $0)/pids", *first, "exec sleep 1000"]))


def test_a_py_spy_that_hangs_is_given_up_in_time_and_ended(scene: Scene) -> None:
    scene.python(READS)
    taken, stacks = scene.look(hanging(scene), within_s=1.0)
    assert not stacks
    assert posture(taken).rank.why_none == "py-spy did not answer in time"
    assert posture(taken).rank.state == "S"
    (pid,) = lines(scene.root / "pids")
    wait_for("its end", lambda: not is_running(int(pid)))


def test_a_look_that_is_called_off_leaves_nothing_behind(scene: Scene) -> None:
    scene.python(READS)
    tracer = scene.tracer(hanging(scene))

    async def call_off() -> None:
        looking = asyncio.create_task(tracer.take(order()))
        await asyncio.to_thread(wait_for, "py-spy", lambda: lines(scene.root / "pids"))
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking

    asyncio.run(call_off())
    (pid,) = lines(scene.root / "pids")
    wait_for("its end", lambda: not is_running(int(pid)))


def test_what_py_spy_paused_runs_on_even_if_py_spy_is_killed(scene: Scene) -> None:
    """Frames below Python need a pause; here py-spy stops the rank and then hangs."""
    rank = scene.python(READS)
    spy = Spy(hanging(scene, 'for pid; do :; done; kill -STOP "$pid"'))

    async def pause() -> None:
        assert scene.rank is not None
        answer = await spy.dump(scene.rank, 1.0, native=True)
        assert answer.dump is None
        await spy.resumed()

    asyncio.run(pause())
    assert lines(scene.root / "pids"), "it did begin"
    wait_for("the rank to run", lambda: state(rank.pid) in "RS")


def test_frames_below_python_are_had_of_ranks_that_show_no_wait(scene: Scene) -> None:
    rank = scene.python(READS)
    _, (plain,) = scene.look()
    taken, (stack,) = scene.look(native=True)
    assert (plain.native, stack.native) == (False, True)
    assert any("libc" in frame.file for frame in stack.threads[0].frames)
    shown = posture(taken).rank
    assert shown.state == state(rank.pid) == "S"
    waits_in = Path(f"/proc/{rank.pid}/wchan").read_text()
    assert shown.wchan == waits_in or waits_in == "0", "a kernel without names"


def test_no_rank_is_paused_beside_one_that_the_kernel_holds(scene: Scene) -> None:
    """It is known what they wait for."""
    held = scene.python(READS)
    scene.held = scene.rank
    scene.python(READS)
    os.kill(held.pid, signal.SIGSTOP)
    wait_for("the stop", lambda: state(held.pid) == "T")
    tracer = scene.tracer()
    taken = asyncio.run(tracer.take(order(native=True)))
    assert [look.posture.rank.state for look in taken.ranks] == ["S", "T"]
    assert not any(stack.native for stack in tracer._kept[1].values())


def test_a_rank_in_a_debugger_is_neither_paused_nor_sent_a_signal(scene: Scene) -> None:
    rank = scene.python(READS)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.ptrace(SEIZE, rank.pid, None, None) == 0, os.strerror(ctypes.get_errno())
    _, (stack,) = scene.look(native=True)
    assert not stack.native

    async def fail() -> None:
        spy = Spy(scene.program("exit 1"))
        assert scene.rank is not None
        await spy.dump(scene.rank, 30.0, native=True)
        await spy.resumed()

    asyncio.run(fail())
    assert state(rank.pid) == "S", "it would wait for its debugger now"


# --- processes of a rank -------------------------------------------------------------------------


def test_every_process_below_a_rank_is_seen_whatever_it_is(scene: Scene) -> None:
    """One that is stopped, one that is dead and not yet noticed, and one without Python."""
    rank = scene.python(
        """
        import os, signal, subprocess, sys
        os.posix_spawnp("true", ["true"], {})
        subprocess.Popen(["sleep", "1000"])
        for _ in range(2):
            if os.fork() == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
        """,
        READS,
    )
    wait_for("them all", lambda: sorted(map(state, children(rank.pid))) == ["S", "T", "T", "Z"])
    taken, _ = scene.look()
    found = {(child.shown.state, child.count): child for child in posture(taken).children}
    assert set(found) == {("S", 1), ("T", 2), ("Z", 1)}
    assert all(child.role is Role.CHILD for child in found.values())
    assert found["T", 2].shown.stack
    assert found["S", 1].shown.why_none == "there is no Python in it"
    assert found["Z", 1].shown.why_none == "it has ended and nobody has noticed"


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_behind_a_shell_that_started_the_script_the_script_is_what_is_shown(scene: Scene) -> None:
    script = scene.root / "inner.py"
    script.write_text(textwrap.dedent(READS))
    rank = scene.start("sh", "-c", f"{sys.executable} {script} < /dev/stdin; true")
    taken, _ = scene.look()
    inner, (shell,) = posture(taken).rank, posture(taken).children
    assert inner.stack
    assert (shell.role, shell.shown.why_none) == (Role.CHILD, "there is no Python in it")
    assert taken.ranks[0].pid == rank.pid


# --- texts ---------------------------------------------------------------------------------------


def test_texts_are_kept_for_the_newest_looks(scene: Scene) -> None:
    scene.python(READS)
    tracer = scene.tracer()

    async def look() -> None:
        for number in range(1, LOOKS_KEPT + 2):
            await tracer.take(order(look=number))

    asyncio.run(look())
    kept = tracer._kept
    (name,) = kept[LOOKS_KEPT + 1]
    for number, count in ((1, 0), (2, 1), (LOOKS_KEPT + 1, 1), (99, 0)):
        asked = SendStacks(
            id="", cause="", why="", machine=MachineId("m0"), look=number, stacks=(name,)
        )
        assert len(tracer.give(asked).stacks) == count


def test_the_text_of_a_runaway_recursion_is_bounded() -> None:
    frame = Frame(name="f" * 10_000, file="x" * 10_000 + "end.py", line=1)
    threads = tuple(Thread(frames=(frame,) * 5000, name=str(number)) for number in range(100))
    main = Thread(frames=(Frame(name="main"),), main=True)
    small = bounded((*threads, main))
    assert small[0] == main
    assert len(small[1].frames) == FRAMES_MAX
    assert small[1].frames[0].file.endswith("end.py")
    assert len(msgspec.msgpack.encode(small)) < 2 * STACK_CHARS_MAX < ANSWER_CHARS_MAX


# --- flight records ------------------------------------------------------------------------------


def entry(op: int, seq: int, **fields: Any) -> dict[str, Any]:
    """As torch 2.13 writes it with gloo: the state stays, `retired` says that it is done."""
    return {
        "collective_seq_id": seq,
        "input_dtypes": ["Float"],
        "input_sizes": [[7, 2]],
        "is_p2p": False,
        "op_id": op,
        "output_dtypes": ["Float"],
        "output_sizes": [[7, 2]],
        "p2p_seq_id": 0,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "profiling_name": "gloo:all_reduce",
        "retired": True,
        "state": "scheduled",
        **fields,
    }


def record(*entries: dict[str, Any], enqueued: int, completed: int, rank: int) -> recorder.Stands:
    status = {
        "last_completed_collective": str(completed),
        "last_enqueued_collective": str(enqueued),
    }
    body = {
        "version": "2.10",
        "pg_config": {"": {"desc": "", "name": "", "ranks": "[]"}},
        "pg_status": {"0": {**status, "last_started_collective": "-1"}},
        "entries": list(entries),
    }
    told = Recorder(
        generation=GENERATION, pid=1, groups=(NamedGroup(name="0", members=((0, 1), (4, 5))),)
    )
    return recorder._read(msgspec.json.encode(body), Rank(rank), told)


def test_sends_and_receives_that_gloo_counts_do_not_move_a_rank_ahead() -> None:
    """gloo's status says 9 after five collectives and four sends; another rank sent nothing."""
    sender = record(entry(4, 4), entry(9, 5, retired=False), enqueued=9, completed=8, rank=0)
    other = record(entry(4, 4), entry(5, 5, retired=False), enqueued=5, completed=4, rank=1)
    behind = record(entry(3, 3), entry(8, 4), enqueued=8, completed=8, rank=4)
    stood = recorder.summarised([sender, other, behind])
    shown = {each.ranks: (each.enqueued, each.completed, len(each.calls)) for each in stood}
    assert shown == {((0, 1),): (5, 4, 1), ((4, 4),): (4, 4, 0)}
    assert {each.members for each in stood} == {((0, 1), (4, 5))}


def test_a_pending_send_names_the_rank_and_not_its_place_in_the_group() -> None:
    sends = entry(5, 4, is_p2p=True, profiling_name="nccl:send 0->2", retired=False)
    found = record(entry(4, 4), sends, enqueued=4, completed=4, rank=0)
    ((peer),) = found.peers
    assert (peer.rank, peer.peer, peer.sends) == (0, 4, True)


def test_a_server_that_is_gone_or_answers_nonsense_is_said_and_stops_nothing(
    scene: Scene, answers: Callable[[bytes], None]
) -> None:
    scene.python(READS)
    assert scene.rank is not None
    told = Recorder(generation=GENERATION, pid=scene.rank.pid, groups=())
    (scene.job.shm / "recorder-0").write_bytes(msgspec.json.encode(told))
    taken, _ = scene.look()
    assert "flight record cannot be had" in taken.remark
    for answer, remark in (
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "torch's server answered"),
        (b"HTTP/1.1 200 OK\r\n\r\n{", "its flight record is none"),
    ):
        answers(answer)
        taken, stacks = scene.look()
        assert remark in taken.remark
        assert stacks


@pytest.fixture
def answers(scene: Scene) -> Iterator[Callable[[bytes], None]]:
    """Sets what a server in the place of torch's answers to everybody."""
    path = scene.job.shm / "recorder-0.sock"
    with contextlib.ExitStack() as stack:

        def serve(listener: socket.socket, answer: bytes) -> None:
            with listener, contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer)

        def begin(answer: bytes) -> None:
            path.unlink(missing_ok=True)
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(path))
            listener.listen()
            thread = threading.Thread(target=serve, args=(listener, answer))
            thread.start()
            stack.callback(thread.join)

        yield begin
