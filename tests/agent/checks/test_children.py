"""Children that answer, hang, die, speak garbage, or cannot be killed: all of them real processes.

The one that cannot be killed is frozen by the cgroup freezer (v1): like one that hangs in a driver,
it takes no signal.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from everstep.agent.checks import children
from everstep.agent.checks.check import Here
from everstep.agent.checks.child import MESSAGE_BYTES_MAX, NICE
from everstep.agent.checks.children import Child, Unanswered
from everstep.agent.checks.judging import Failed
from everstep.agent.checks.memory import KeptChild
from everstep.processes import Process, alive, identify, send_signal
from tests.agent.checks.parts import Moody, Pid, Unimportable
from tests.agent.support import wait_for

ROOT = Path(__file__).parents[3]
FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children find the sources of tests."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(root=str(tmp_path))


def mood(here: Here, word: str) -> None:
    here.path("/mood").write_text(word)


def made(former: KeptChild | None = None, source: type[Moody] = Moody) -> Child:
    return Child(source(), Path("/nowhere"), former, lambda: None)


def with_child(work: Callable[[Child], Awaitable[None]], child: Callable[[], Child] = made) -> None:
    """Run it, and end the child whatever happens."""

    async def run() -> None:
        asked = child()
        try:
            await work(asked)
        finally:
            await asked.close()
            assert asked.process is None, "a child is left"

    asyncio.run(run())


def pid_in(answer: object) -> int:
    assert isinstance(answer, bytes), answer
    return msgspec.msgpack.decode(answer, type=Pid).pid


def test_a_child_answers_again_and_again_and_ends_with_its_agent(here: Here) -> None:
    mood(here, "answer")
    seen: list[Process] = []

    async def work(child: Child) -> None:
        first = await child.ask(here)
        assert isinstance(first, bytes)
        sample = msgspec.msgpack.decode(first, type=Pid)
        assert sample.nice >= NICE
        assert {pid_in(await child.ask(here)) for _ in range(5)} == {sample.pid}
        assert child.process == identify(sample.pid)
        assert child.process is not None
        seen.append(child.process)
        assert child.cpu_s > 0
        assert child._running is not None
        assert child._running.popen.stdin is not None
        child._running.popen.stdin.close()  # what the kernel does when the agent dies
        wait_for("its end", lambda: not alive(seen[0]))

    with_child(work)


def test_a_child_that_hangs_is_killed_and_the_next_one_answers(here: Here) -> None:
    async def work(child: Child) -> None:
        mood(here, "hang")
        first = await child.ask(here)
        assert isinstance(first, Unanswered)
        assert (first.times, first.stuck) == (1, False)
        assert first.for_s >= Moody.within_s
        assert child.process is None
        second = await child.ask(here)
        assert isinstance(second, Unanswered)
        assert second.times == 2
        assert second.for_s >= first.for_s + Moody.within_s
        third = await child.ask(here)
        assert isinstance(third, Unanswered)
        assert (third.times, child.process) == (2, None), "the third waits a little"
        mood(here, "answer")
        child._start_at = 0.0
        assert pid_in(await child.ask(here))
        mood(here, "hang")
        again = await child.ask(here)
        assert isinstance(again, Unanswered)
        assert again.times == 1, "counted in a row"

    with_child(work)


def test_a_stopped_child_is_one_that_hangs(here: Here) -> None:
    async def work(child: Child) -> None:
        mood(here, "answer")
        pid = pid_in(await child.ask(here))
        os.kill(pid, signal.SIGSTOP)
        answer = await child.ask(here)
        assert isinstance(answer, Unanswered)
        assert not answer.stuck, "SIGKILL ends it all the same"
        assert pid_in(await child.ask(here)) != pid

    with_child(work)


def test_a_child_that_turns_in_circles_hangs_too(here: Here) -> None:
    async def work(child: Child) -> None:
        mood(here, "spin")
        deadline = time.monotonic() + 60.0
        while not isinstance(answer := await child.ask(here), Unanswered):
            # Where all processors are busy it may not turn much.
            assert isinstance(answer, Failed)
            assert "got no processor" in answer.why
            assert time.monotonic() < deadline
            child._start_at = 0.0

    with_child(work)


def test_time_in_which_it_could_not_run_does_not_count(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine whose processors are all busy has no sick driver."""
    shares = [0.5, 1.0]
    monkeypatch.setattr(children, "_delayed_s", lambda pid: shares[0] * time.monotonic())
    monkeypatch.setattr(children, "DELAYED_MAX", 4.0)

    async def work(child: Child) -> None:
        mood(here, "answer")
        await child.ask(here)
        mood(here, "hang")
        began = time.monotonic()
        answer = await child.ask(here)
        assert isinstance(answer, Unanswered), "it could run for half of the time"
        assert time.monotonic() - began >= 2 * Moody.within_s
        del shares[0]
        child._start_at, began = 0.0, time.monotonic()
        starved = await child.ask(here)
        assert isinstance(starved, Failed), "it could not run at all"
        assert "no processor" in starved.why
        assert time.monotonic() - began >= 4 * Moody.within_s, "but it does not take for ever"

    with_child(work)


@pytest.fixture
def frozen() -> Iterator[Callable[[int], None]]:
    """Freezes a process; thaws at the end."""
    group = FREEZER / f"everstep-test-{os.getpid()}"
    group.mkdir()

    def freeze(pid: int) -> None:
        (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        wait_for("ice", lambda: (group / "freezer.state").read_text().strip() == "FROZEN")

    yield freeze
    (group / "freezer.state").write_text("THAWED")
    wait_for("an empty group", lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def thaw() -> None:
    (FREEZER / f"everstep-test-{os.getpid()}" / "freezer.state").write_text("THAWED")


def test_beside_a_child_that_cannot_be_killed_there_is_never_a_second_one(
    here: Here, frozen: Callable[[int], None]
) -> None:
    """By no agent of this machine; when it is gone at last, the next one is started."""
    mood(here, "answer")

    async def ask_former() -> tuple[KeptChild, subprocess.Popen[bytes]]:
        former = made()
        frozen(pid_in(await former.ask(here)))
        first = await former.ask(here)
        assert isinstance(first, Unanswered)
        assert (first.times, first.stuck) == (1, True)
        for _ in range(3):
            later = await former.ask(here)
            assert isinstance(later, Unanswered)
            assert (later.times, later.stuck) == (1, True)
            assert later.for_s > first.for_s
        kept = former.kept
        assert kept is not None
        assert kept.silent_since is not None
        assert former._reap is not None
        return kept, former._reap

    async def next_agent(child: Child) -> None:
        answer = await child.ask(here)
        assert isinstance(answer, Unanswered)
        assert (answer.times, answer.stuck) == (1, True)
        assert kept.silent_since is not None
        assert answer.for_s >= children.clock() - kept.silent_since - 1
        assert child.process == process
        assert alive(process)
        thaw()
        wait_for("its end", lambda: not alive(process))
        assert pid_in(await child.ask(here)) != process.pid

    kept, popen = asyncio.run(ask_former())
    process = kept.process
    with_child(next_agent, lambda: made(kept))
    popen.wait()


def test_a_child_of_a_killed_agent_is_ended_before_there_is_another(here: Here) -> None:
    async def leave_behind() -> KeptChild:
        former = made()
        await former.ask(here)
        kept = former.kept
        assert kept is not None
        assert former._running is not None
        former._running.replies.close()
        left.append(former._running.popen)
        return kept

    async def next_agent(child: Child) -> None:
        assert pid_in(await child.ask(here)) != kept.pid
        assert not alive(kept.process)

    left: list[subprocess.Popen[bytes]] = []
    mood(here, "answer")
    kept = asyncio.run(leave_behind())
    with_child(next_agent, lambda: made(kept))
    with left[0]:
        pass  # reaped, and its pipes closed


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("raise", "it is in no mood"),
        ("defect", "it is defective: KeyError 'defect' at parts.py:"),
        ("huge", "it is defective: OverflowError"),
        ("nonsense" * 2, ""),
    ],
)
def test_what_a_source_raises_is_told_and_the_child_goes_on(
    here: Here, word: str, why: str
) -> None:
    async def work(child: Child) -> None:
        mood(here, word)
        answer = await child.ask(here)
        if why:
            assert isinstance(answer, Failed)
            assert answer.why.startswith(why)
        here.path("/mood").unlink()
        missing = await child.ask(here)
        assert isinstance(missing, Failed)
        assert "No such file" in missing.why
        mood(here, "print")
        assert pid_in(await child.ask(here)), "what a library prints is no answer"

    with_child(work)


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("die", "it ended with exit code 3"),
        ("garbage \xff\xff\xff\xff garbage", "a message of"),
        ("garbage \x03\x00\x00\x00\xc1\xc1\xc1", "invalid"),
    ],
)
def test_a_child_that_ends_or_speaks_garbage_is_replaced(here: Here, word: str, why: str) -> None:
    async def work(child: Child) -> None:
        mood(here, word)
        answer = await child.ask(here)
        assert isinstance(answer, Failed)
        assert why in answer.why.lower()
        mood(here, "answer")
        assert pid_in(await child.ask(here))

    with_child(work)


def test_a_child_that_ends_between_two_questions_is_replaced(here: Here) -> None:
    async def work(child: Child) -> None:
        mood(here, "answer")
        pid = pid_in(await child.ask(here))
        process = identify(pid)
        assert process is not None
        send_signal(process, signal.SIGKILL)
        wait_for("its end", lambda: not alive(process))
        answer = await child.ask(here)
        assert isinstance(answer, Failed)
        assert pid_in(await child.ask(here)) != pid

    with_child(work)


def test_a_source_that_cannot_be_made_is_no_finding_and_not_tried_all_the_time(here: Here) -> None:
    mood(here, "answer")

    async def work(child: Child) -> None:
        for _ in range(3):
            answer = await child.ask(here)
            assert isinstance(answer, Failed)
            assert "no such driver" in answer.why
        assert child._pause_s == 2.0, "two starts, and a pause"

    with_child(work, lambda: made(source=Unimportable))


def test_a_message_without_end_is_not_kept(here: Here) -> None:
    async def work() -> None:
        read, write = os.pipe()
        replies = children.Replies(read)
        try:
            sent = 0
            os.set_blocking(write, False)
            while not replies.ended:
                sent += os.write(write, b"\x01\x00\x00\x00" + b"\xff" * 65000)
                replies.read()
            assert sent < MESSAGE_BYTES_MAX + (1 << 18)
        finally:
            replies.close()
            os.close(read)
            os.close(write)

    asyncio.run(work())
