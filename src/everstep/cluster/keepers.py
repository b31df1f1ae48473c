"""Describes and starts keepers: of a machine (agent, launcher) and of the controller's host.

Used by cluster/local.py for stand-ins, and by the command line for the machine it runs on and for
the host of the controller. It never waits for what it starts.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from everstep.files import write_atomically
from everstep.model import Value
from everstep.paths import JobPaths, MachinePaths, MachineSetup, shm_dir
from everstep.processes import Process, identify

SETUP_NAME = "keeper.json"
MODULE = "everstep.keeper"


class Service(Value, frozen=True, kw_only=True):
    """One process that a keeper starts again whenever it dies."""

    argv: list[str]
    log: str
    env: dict[str, str] = {}
    pid_file: str


class KeeperSetup(Value, frozen=True, kw_only=True):
    """Content of keeper.json, the keeper's only argument."""

    pid_file: str
    exits: str | None
    """Where to note how every reaped process ended; None for the host of the controller."""
    services: dict[str, Service]
    sweep: bool = True
    """Whether to kill every descendant at the end."""
    remove: list[str] = []
    """Directories to delete after that."""


def machine_keeper(paths: MachinePaths, setup: MachineSetup) -> KeeperSetup:
    """What the keeper of this machine runs: the agent and the launcher."""
    return KeeperSetup(
        pid_file=str(paths.pid_file("keeper")),
        exits=str(paths.exits),
        services={
            "agent": _machine_service(paths, "agent", "everstep.agent"),
            "launcher": _machine_service(paths, "launcher", "everstep.agent.launcher"),
        },
        remove=[str(shm_dir(setup.job, setup.uid, setup.machine))],
    )


def controller_keeper(paths: JobPaths, flags: list[str]) -> KeeperSetup:
    """What the keeper on the controller's host runs; `flags` are added to the controller's own."""
    return KeeperSetup(
        pid_file=str(paths.keeper_pid),
        exits=None,
        services={
            "controller": Service(
                argv=_python("everstep.controller", str(paths.root), "--resume-if-needed", *flags),
                log=str(paths.controller_log),
                pid_file=str(paths.controller_pid),
            )
        },
    )


MakeKeeper = Callable[[MachinePaths, MachineSetup], KeeperSetup]


def write_machine(
    paths: MachinePaths, setup: MachineSetup, make_keeper: MakeKeeper = machine_keeper
) -> Path:
    """Write machine.json and its keeper's setup; returns the path of the latter."""
    paths.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    keeper = paths.root / SETUP_NAME
    write_atomically(keeper, make_keeper(paths, setup))
    write_atomically(paths.setup, setup)
    return keeper


def command(setup: Path) -> list[str]:
    """The keeper's command line. It names the job's directory, so that `clean` finds it."""
    return _python(MODULE, str(setup))


def start_keeper(setup: Path, log: Path) -> Process | None:
    """Start a detached keeper: own session, no terminal, output to `log`.

    Returns it, or None if it was gone at once (its log says why). It becomes a child of the
    caller, which may reap it or die.
    """
    argv = command(setup)
    log_flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    pid = os.posix_spawn(
        argv[0],
        argv,
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), log_flags, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        # Python ignores these two, and an ignored signal stays ignored across exec.
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
    )
    return identify(pid)


def _machine_service(paths: MachinePaths, name: str, module: str) -> Service:
    return Service(
        argv=_python(module, str(paths.setup)),
        log=str(paths.log(name)),
        pid_file=str(paths.pid_file(name)),
    )


def _python(module: str, *arguments: str) -> list[str]:
    # -P: a file called random.py in the user's directory is not to be ours.
    return [sys.executable, "-P", "-m", module, *arguments]
