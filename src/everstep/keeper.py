"""The parent process on each machine: starts agent and launcher again, reaps every rank.

Run as `python -m everstep.keeper SETUP.json` by the scheduler's task, by PID 1 or by the local
cluster; on the controller's host the same program keeps the controller alive. It must never die
of anything but a kill, so it stays small, single-threaded, on the standard library alone and
without the rest of everstep. What a dead rank means is decided by the agent, who reads `exits`.

SETUP is a JSON object:
    pid_file   where to write "PID START_TICKS" of this process
    exits      file that gets one line "PID START_TICKS STATUS" (STATUS as of wait(2)) for every
               process that ended below us, written before the process is reaped; or null
    services   name -> {argv, log, pid_file, env}: what to start, and to start again if it ends
    sweep      whether to kill everything below us at the end (default true)
    remove     directories to delete after that (default none)

A service that exits with EXIT_RELEASE, or SIGTERM to the keeper, ends it all.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

EXIT_RELEASE = 64
"""Exit code by which a service says that its keeper's work is done."""
BACK_OFF_MAX_S = 2.0
STABLE_AFTER_S = 1.0
"""A service that lived this long is started again at once when it dies."""
_PR_SET_CHILD_SUBREAPER = 36
_LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND
_TAKEN = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)


def stat_fields(pid: int) -> list[str]:
    """/proc/PID/stat after the name: state, parent, ..., start ticks at 19. Empty if gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].split()
    except OSError:
        return []


def children() -> list[int]:
    """Pids whose parent we are. Nobody else can reap them, so these pids cannot change hands."""
    pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
    return [pid for pid in pids if stat_fields(pid)[1:2] == [str(os.getpid())]]


def write_pid_file(path: str, pid: int) -> None:
    """Whole or not at all: readers see the old process or this one."""
    beside = Path(f"{path}.new")
    beside.write_text(f"{pid} {stat_fields(pid)[19]}\n")
    beside.replace(path)


def alive_from_pid_file(path: str) -> int | None:
    """The live process that the file names (a zombie is none), None if there is none."""
    with contextlib.suppress(OSError, ValueError):
        pid, ticks = Path(path).read_text().split()
        fields = stat_fields(int(pid))  # of a zombie, other threads may live
        if fields and fields[19] == ticks and (fields[0] not in "ZX" or int(fields[17]) > 1):
            return int(pid)
    return None


def say(text: str) -> None:
    """A line in the keeper's log. A full disk must not end us."""
    with contextlib.suppress(OSError):
        os.write(1, f"{time.strftime('%F %T')} keeper {os.getpid()}: {text}\n".encode())


class Service:
    """One process to start, and to start again whenever it dies."""

    def __init__(self, name: str, setup: dict[str, Any]) -> None:
        self.pid: int | None = None
        self.start_at = 0.0
        self._name = name
        self._setup = setup
        self._started = 0.0
        self._back_off_s = 0.0
        if leftover := alive_from_pid_file(setup["pid_file"]):
            os.kill(leftover, signal.SIGKILL)
            say(f"killed {name} {leftover}, left behind by a killed keeper")

    def start(self) -> None:
        setup = self._setup
        self._started = time.monotonic()
        try:
            self.pid = os.posix_spawn(
                setup["argv"][0],
                setup["argv"],
                {**os.environ, **setup.get("env", {})},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, setup["log"], _LOG_FLAGS, 0o600),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                ],
                setsid=True,
                setsigmask=[],
                # Python ignores these two, and an ignored signal stays ignored across exec.
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
            )
            write_pid_file(setup["pid_file"], self.pid)
        except OSError as error:
            say(f"cannot start {self._name} {setup['argv']}, log {setup['log']}: {error}")
            if self.pid is None:
                self.ended("not started")

    def ended(self, how: object) -> None:
        """The first early death is forgiven; then the pause doubles. Never give up: ranks run."""
        say(f"{self._name} {self.pid} ended: {how}")
        self.pid = None
        now = time.monotonic()
        if now - self._started >= STABLE_AFTER_S:
            self._back_off_s = 0.0
        self.start_at = now + self._back_off_s
        self._back_off_s = min(max(0.05, 2 * self._back_off_s), BACK_OFF_MAX_S)


class Keeper:
    """The loop. Signals stay blocked and are taken one by one, so nothing runs in between."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._setup = setup
        self._services = [Service(name, each) for name, each in setup["services"].items()]

    def run(self) -> None:
        # SIGHUP stays untaken for ever: a lost terminal ends nothing.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP, *_TAKEN])
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        write_pid_file(self._setup["pid_file"], os.getpid())
        while not self._reap():
            taken = signal.sigtimedwait(_TAKEN, self._start_due())
            if taken is not None and taken.si_signo != signal.SIGCHLD:
                break
        while self._setup.get("sweep", True) and (remaining := children()):
            for pid in remaining:  # when they die, their children become ours
                os.kill(pid, signal.SIGKILL)
            signal.sigtimedwait([signal.SIGCHLD], 0.05)
            self._reap()
        for directory in self._setup.get("remove", []):
            shutil.rmtree(directory, ignore_errors=True)
        Path(self._setup["pid_file"]).unlink(missing_ok=True)

    def _start_due(self) -> float:
        """Start what is due; returns the seconds until the next start (an hour if none)."""
        for service in self._services:
            if service.pid is None and service.start_at <= time.monotonic():
                service.start()
        waiting = [service.start_at for service in self._services if service.pid is None]
        return max(0.0, min(waiting) - time.monotonic()) if waiting else 3600.0

    def _reap(self) -> bool:
        """Note and reap all that ended; whether one of the services said that the work is done."""
        released = False
        with contextlib.suppress(ChildProcessError):  # no child: a service waits for its back-off
            while seen := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                exited, dumped = seen.si_code == os.CLD_EXITED, seen.si_code == os.CLD_DUMPED
                status = seen.si_status << 8 if exited else seen.si_status | 0x80 * dumped
                self._note(f"{seen.si_pid} {stat_fields(seen.si_pid)[19]} {status}\n")
                os.waitpid(seen.si_pid, 0)
                for service in self._services:
                    if service.pid == seen.si_pid:
                        service.ended(os.waitstatus_to_exitcode(status))
                        released |= exited and seen.si_status == EXIT_RELEASE
        return released

    def _note(self, line: str) -> None:
        """Called before the reaping, so that whoever sees the pid vanish finds the line."""
        try:
            with Path(self._setup["exits"] or os.devnull).open("a") as exits:
                exits.write(line)
        except OSError as error:
            say(f"cannot note {line!r} in {self._setup['exits']}: {error}")


def main() -> None:
    """Entry point: a setup that cannot be used is one sentence and exit code 2."""
    try:
        setup = json.loads(Path(sys.argv[1]).read_bytes())
        if running := alive_from_pid_file(setup["pid_file"]):
            sys.exit(f"everstep keeper: keeper {running} runs here already; stop it first")
        keeper = Keeper(setup)
    except (IndexError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        sys.stderr.write(f"everstep keeper: cannot use the setup {sys.argv[1:]}: {error!r}\n")
        sys.exit(2)
    keeper.run()


if __name__ == "__main__":
    main()
