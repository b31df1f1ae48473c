"""Promises of keeper.py, each kept by a real keeper over real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.support import is_running, lines, wait_for

SLEEP = "exec sleep 1000"


class Kept:
    """A keeper in a directory, and what it wrote there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.exits = root / "exits"
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, **services: str) -> subprocess.Popen[bytes]:
        """Each service is a line of shell."""
        described = {
            name: {
                "argv": ["/bin/sh", "-c", line],
                "log": str(self.root / f"{name}.log"),
                "env": {"SERVICE": name},
                "pid_file": str(self.root / f"{name}.pid"),
            }
            for name, line in services.items()
        }
        return self.start_with(
            {
                "pid_file": str(self.root / "keeper.pid"),
                "exits": str(self.exits),
                "services": described,
                "remove": [str(self.root / "shm")],
            }
        )

    def start_with(self, setup: object) -> subprocess.Popen[bytes]:
        path = self.root / "keeper.json"
        path.write_text(json.dumps(setup))
        with (self.root / "keeper.log").open("ab") as log:
            keeper = subprocess.Popen(
                [sys.executable, "-m", "everstep.keeper", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.started.append(keeper)
        return keeper

    def pid(self, service: str, other_than: int = 0) -> int:
        """Waits for the live process of this service."""

        def look() -> int | None:
            found = lines(self.root / f"{service}.pid")
            pid = int(found[0].split()[0]) if found else 0
            return pid if pid not in (0, other_than) and is_running(pid) else None

        return wait_for(f"a {service} other than {other_than}", look)

    def status_of(self, written: Path) -> int:
        """The status in `exits` of the process that wrote "PID START_TICKS" into this file."""

        def look() -> str | None:
            named = lines(written)
            for line in lines(self.exits) if named else []:
                if line.rpartition(" ")[0] == named[0]:
                    return line.rpartition(" ")[2]
            return None

        return int(wait_for(f"the exit status of {written.name}", look))

    @property
    def log(self) -> str:
        return (self.root / "keeper.log").read_text()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    kept = Kept(tmp_path)
    yield kept
    for keeper in kept.started:
        if keeper.poll() is None:
            keeper.terminate()
        keeper.wait(90)
    for path in tmp_path.glob("*.pid"):
        pid = int(path.read_text().split()[0])
        if path.name != "keeper.pid" and is_running(pid):
            os.kill(pid, signal.SIGKILL)


def orphan(kept: Kept, name: str, then: str) -> str:
    """Shell that leaves a process in a session of its own, which says who it is, then does this."""
    script = kept.root / f"{name}.sh"
    script.write_text(f"cut -d' ' -f1,22 /proc/$$/stat > {kept.root / name}\n{then}\n")
    return f"(setsid sh {script} &); "


def test_orphans_are_reaped_and_their_status_is_recorded(kept: Kept) -> None:
    kept.start(
        parent=orphan(kept, "seven", "exit 7")
        + orphan(kept, "killed", "kill -9 $$")
        + orphan(kept, "fine", "exit 0")
        + SLEEP
    )
    assert kept.status_of(kept.root / "seven") == 7 << 8
    assert kept.status_of(kept.root / "killed") == signal.SIGKILL
    assert kept.status_of(kept.root / "fine") == 0
    pid = int(lines(kept.root / "seven")[0].split()[0])
    wait_for("the zombie to be reaped", lambda: not Path(f"/proc/{pid}").exists())


def test_a_killed_service_comes_back_and_disturbs_no_other(kept: Kept) -> None:
    kept.start(agent=SLEEP, launcher=SLEEP)
    agent, launcher = kept.pid("agent"), kept.pid("launcher")
    for _ in range(3):
        os.kill(launcher, signal.SIGKILL)
        launcher = kept.pid("launcher", other_than=launcher)
    assert kept.pid("agent") == agent
    assert is_running(agent)


def test_a_service_that_always_fails_is_tried_for_ever_with_growing_pauses(kept: Kept) -> None:
    kept.start(broken="echo $SERVICE $(cut -d' ' -f1 /proc/uptime)", fine=SLEEP)
    wait_for("five attempts", lambda: len(lines(kept.root / "broken.log")) >= 5)
    times = [float(line.split()[1]) for line in lines(kept.root / "broken.log")]
    # 0, 0.05, 0.1, 0.2 s pause: waiting may take longer on a busy machine, never shorter.
    assert times[4] - times[0] >= 0.34
    assert is_running(kept.pid("fine"))


def test_a_program_that_does_not_exist_is_named_and_stops_no_other(kept: Kept) -> None:
    described = {
        name: {
            "argv": [program, "1000"],
            "log": str(kept.root / f"{name}.log"),
            "pid_file": str(kept.root / f"{name}.pid"),
        }
        for name, program in {"agent": "/no/such/program", "launcher": "/bin/sleep"}.items()
    }
    kept.start_with(
        {"pid_file": str(kept.root / "keeper.pid"), "exits": None, "services": described}
    )
    launcher = kept.pid("launcher")
    wait_for("a second attempt", lambda: kept.log.count("cannot start agent") >= 2)
    assert "/no/such/program" in kept.log
    assert is_running(launcher)


@pytest.mark.parametrize("order", ["SIGTERM", "a service releases it"])
def test_at_the_end_nothing_is_left(kept: Kept, order: str) -> None:
    """Neither what ignores SIGTERM in a session of its own, nor its children, nor shared memory."""
    (kept.root / "shm").mkdir()
    stubborn = orphan(kept, "stubborn", "trap '' TERM; sleep 1000 & wait")
    release = f"until [ -e {kept.root}/go ]; do sleep 0.01; done; exit 64"
    keeper = kept.start(agent=release, launcher=stubborn + SLEEP)
    launcher = kept.pid("launcher")
    pid = int(wait_for("the orphan", lambda: lines(kept.root / "stubborn"))[0].split()[0])
    if order == "SIGTERM":
        keeper.terminate()
    else:
        (kept.root / "go").touch()
    assert keeper.wait(90) == 0
    assert not is_running(pid)
    assert not is_running(launcher)
    assert sessions_below(kept.root) == []
    assert not (kept.root / "keeper.pid").exists()
    assert not (kept.root / "shm").exists()


def sessions_below(root: Path) -> list[str]:
    """Command lines of live processes that name this directory."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if str(root).encode() in words and is_running(int(entry.name)):
            found.append(words.decode())
    return found


def test_a_full_or_read_only_disk_does_not_end_it(kept: Kept) -> None:
    """Here the file of exits cannot be opened: the ranks' statuses are lost, the ranks are not."""
    kept.exits.mkdir()
    kept.start(agent=SLEEP)
    agent = kept.pid("agent")
    os.kill(agent, signal.SIGKILL)
    assert is_running(kept.pid("agent", other_than=agent))
    assert f"cannot note '{agent} " in kept.log


def test_a_lost_terminal_ends_nothing(kept: Kept) -> None:
    keeper = kept.start(agent=SLEEP)
    agent = kept.pid("agent")
    keeper.send_signal(signal.SIGHUP)
    os.kill(agent, signal.SIGKILL)
    assert kept.pid("agent", other_than=agent) != agent
    assert keeper.poll() is None


def test_what_a_killed_keeper_left_is_replaced_by_the_next_one(kept: Kept) -> None:
    first = kept.start(agent=SLEEP)
    agent = kept.pid("agent")
    first.kill()
    first.wait()
    assert is_running(agent)
    second = kept.start(agent=SLEEP)
    assert kept.pid("agent", other_than=agent) != agent
    assert not is_running(agent)
    assert second.poll() is None


def test_a_second_keeper_of_the_same_machine_refuses(kept: Kept) -> None:
    first = kept.start(agent=SLEEP)
    agent = kept.pid("agent")
    assert kept.start(agent=SLEEP).wait(30) == 1
    assert f"keeper {first.pid} runs here already" in kept.log
    assert is_running(agent)


@pytest.mark.parametrize(
    ("content", "says"),
    [("{", "JSONDecodeError"), ("{}", "pid_file"), ("[]", "TypeError"), (None, "No such file")],
)
def test_a_setup_that_cannot_be_used_is_one_sentence(
    tmp_path: Path, content: str | None, says: str
) -> None:
    path = tmp_path / "setup.json"
    if content is not None:
        path.write_text(content)
    ran = subprocess.run(
        [sys.executable, "-m", "everstep.keeper", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2
    assert says in ran.stderr
    assert str(path) in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
