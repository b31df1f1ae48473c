"""Processes are named so that a reused pid or a zombie is never taken for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep import keeper
from everstep.processes import (
    Process,
    alive,
    descendants,
    entry,
    identify,
    read_pid_file,
    send_signal,
    snapshot,
    wait_gone,
)
from tests.agent.support import wait_for


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def named(process: subprocess.Popen[bytes]) -> Process:
    found = identify(process.pid)
    assert found is not None
    return found


def test_a_zombie_counts_as_gone(sleeper: subprocess.Popen[bytes]) -> None:
    process = named(sleeper)
    assert alive(process)
    sleeper.kill()
    assert wait_gone([process], 10.0) == []
    assert not alive(process)
    assert identify(sleeper.pid) is None
    assert Path(f"/proc/{sleeper.pid}").exists(), "it was not reaped, so it was a zombie"


HALF_ENDED = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(1000,)).start()
print("soon", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_zombie_with_a_live_thread_is_not_gone(tmp_path: Path) -> None:
    """As a rank of which a driver holds one thread: it still has its memory and its children."""
    with subprocess.Popen([sys.executable, "-c", HALF_ENDED], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        wait_for("a zombie", lambda: (there := entry(process.pid)) and there.state == "Z")
        it = named(process)
        assert alive(it)
        assert process.pid in snapshot()
        (tmp_path / "pid").write_text(f"{it.pid} {it.start_ticks}\n")
        assert keeper.alive_from_pid_file(str(tmp_path / "pid")) == it.pid
        process.kill()
        assert wait_gone([it], 10.0) == []
        assert keeper.alive_from_pid_file(str(tmp_path / "pid")) is None


def test_another_process_with_the_same_pid_is_another_process(
    sleeper: subprocess.Popen[bytes],
) -> None:
    process = named(sleeper)
    former = Process(process.pid, process.start_ticks - 1)
    assert not alive(former)
    assert not send_signal(former, signal.SIGKILL)
    assert alive(process)


def test_waiting_for_what_does_not_end_says_so(sleeper: subprocess.Popen[bytes]) -> None:
    assert wait_gone([named(sleeper)], 0.01) == [named(sleeper)]


def test_a_pid_file_names_a_process_only_while_that_one_lives(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    process, file = named(sleeper), tmp_path / "pid"
    assert read_pid_file(file) is None
    file.write_text(f"{process.pid} {process.start_ticks}\n")
    assert read_pid_file(file) == process
    file.write_text(f"{process.pid} {process.start_ticks + 1}\n")
    assert read_pid_file(file) is None
    file.write_text("what?")
    assert read_pid_file(file) is None


def test_a_name_with_blanks_and_brackets_does_not_confuse_the_reading_of_proc(
    tmp_path: Path,
) -> None:
    odd = tmp_path / "a) S 1 (b"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([str(odd), "1000"]) as process:
        assert named(process) in descendants([Process(os.getpid(), 0)])
        process.kill()


def test_descendants_are_found_over_generations_and_sessions() -> None:
    script = "setsid sh -c 'sleep 1000 & echo $!; wait'"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        grandchild = identify(int(shell.stdout.readline()))
        below = descendants([named(shell)])
        assert grandchild in below
        assert named(shell) not in below
        for process in below:
            send_signal(process, signal.SIGKILL)
        shell.kill()
