"""Machines that are not there: stand-ins on this host, each a keeper with an identity of its own.

A stand-in has what makes a machine: a name (m0, m1, ... never used twice), an address (127.0.0.10
and up: all of 127/8 is this host), its own shared memory, its own agent and launcher. Its keeper is
the machine: whoever kills it has destroyed the machine, and this module says so at once.

What was done is read back from the directory of each stand-in, so a restarted controller finds
its machines again: `request` says which request it belongs to, keeper.log exists from the moment
its keeper was started, `gone` says why it is no more. Only the controller calls this.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import sys
from pathlib import Path
from typing import NamedTuple

from everstep.cluster.base import Journalled, Refusal, Report, Request
from everstep.cluster.cleanup import clean_machine
from everstep.cluster.keepers import MODULE as KEEPER
from everstep.cluster.keepers import (
    SETUP_NAME,
    MakeKeeper,
    command,
    machine_keeper,
    start_keeper,
    write_machine,
)
from everstep.core.standby import standbys_at_first
from everstep.events import MachineLost
from everstep.files import write_atomically
from everstep.model import EverstepError, JobSpec, MachineId
from everstep.paths import JobPaths, MachineSetup
from everstep.processes import Process, command_line, everyone, read_pid_file

FIRST_ADDRESS = ipaddress.IPv4Address("127.0.0.10")
AT_START = "at the start of the job"
"""The name of the first request."""
SHORT_LIFE_S = 5.0
IN_VAIN_MAX = 5
"""So many stand-ins in a row that died this young: the next one would, too, and so on for ever."""


class StandIns(NamedTuple):
    """A request for stand-ins: which ones, and what will be run."""

    cluster: LocalCluster
    name: str
    machines: tuple[MachineId, ...]

    def __str__(self) -> str:
        if not self.machines:
            return "no stand-in machine to start"
        return "\n".join(self.cluster.describe(machine) for machine in self.machines)

    def send(self) -> None:
        """Start their keepers. OSError if a directory cannot be written or a process started."""
        for machine in self.machines:
            self.cluster.bring_up(machine, self.name)


class _Watched(NamedTuple):
    keeper: Process
    handle: int
    """A pidfd: it becomes readable when the keeper ends."""
    since: float
    """Time of the event loop."""


class LocalCluster:
    """The stand-ins of one job on this host."""

    def __init__(
        self, spec: JobSpec, paths: JobPaths, make_keeper: MakeKeeper = machine_keeper
    ) -> None:
        """`make_keeper` says what runs on a stand-in."""
        self._make_keeper = make_keeper
        self._spec = spec
        self._paths = paths
        self._report: Report | None = None
        self._watched: dict[MachineId, _Watched] = {}
        self._cleaning: set[asyncio.Task[None]] = set()
        self._released: set[MachineId] = set()
        self._in_vain = 0
        """Stand-ins in a row that did not live for SHORT_LIFE_S."""
        self._idle = asyncio.Event()
        """Set whenever the last watched keeper has ended."""

    # --- the port (base.py) ---

    def watch(self, report: Report) -> None:
        """Find what runs already, say what was lost meanwhile and from now on."""
        self._report = report
        for machine in self._named():
            if not self._file(machine, "gone").exists():
                self._find(machine)

    def first(self) -> Request:
        """What is missing of positions and standbys."""
        return self.request(self._spec.nnodes + standbys_at_first(self._spec), AT_START)

    def request(self, count: int, action: str) -> Request:
        """`count` stand-ins under this name, less those that were started under it before."""
        if self._in_vain >= IN_VAIN_MAX:
            return Refusal(
                f"the last {self._in_vain} stand-ins ended within {SHORT_LIFE_S:g} s of their"
                f" start: see keeper.log in the newest directories of {self._paths.machines}"
            )
        mine = [m for m in self._named() if _read(self._file(m, "request")) == action]
        waiting = [m for m in mine if not self._started(m)]
        numbers = [int(machine[1:]) for machine in self._named()]
        first = max(numbers, default=-1) + 1
        fresh = [MachineId(f"m{first + i}") for i in range(max(0, count - len(mine)))]
        return StandIns(cluster=self, name=action, machines=(*waiting, *fresh))

    def release(self, machine: MachineId) -> None:
        """End the stand-in and all that belongs to it, in the background."""
        done = machine in self._released or self._file(machine, "gone").exists()
        known = machine in self._watched or self._file(machine, "request").exists()
        if known and not done:
            self._released.add(machine)
            self._clean(machine, "released by the controller")

    async def close(self, within_s: float) -> None:
        """Let the keepers end by themselves for so long, then end what is left."""
        if self._watched:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), within_s)
        # The watched ones too: the job's directory may have been deleted.
        for machine in (*self._named(), *self._watched):
            self.release(machine)
        await asyncio.gather(*self._cleaning)

    # --- one stand-in ---

    def describe(self, machine: MachineId) -> str:
        """One line: the machine, its address, and the command that makes it."""
        argv = " ".join(command(self._keeper_setup(machine)))
        return f"stand-in machine {machine} at {_address(machine)}: {argv}"

    def bring_up(self, machine: MachineId, request: str) -> None:
        """Write the stand-in's files and start its keeper."""
        paths = self._paths.machine(machine)
        paths.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(self._file(machine, "request"), request.encode())
        setup = write_machine(paths, self._setup(machine), self._make_keeper)
        keeper = start_keeper(setup, paths.log("keeper"))
        self._watch(machine, keeper, "its keeper ended at once (see its keeper.log)")

    def _setup(self, machine: MachineId) -> MachineSetup:
        return MachineSetup(
            job=self._spec.job,
            uid=self._spec.uid,
            machine=machine,
            address=_address(machine),
            host=socket.gethostname(),
            job_dir=str(self._paths.root),
            nproc_per_node=self._spec.nproc_per_node,
            env={"GLOO_SOCKET_IFNAME": "lo"},
        )

    def _find(self, machine: MachineId) -> None:
        """Watch a stand-in that an earlier controller started; or learn that it is gone."""
        if not self._started(machine):
            return  # the request that it belongs to is sent again
        keeper = read_pid_file(self._paths.machine(machine).pid_file("keeper"))
        if keeper is None:
            keeper = _running_keeper(self._keeper_setup(machine))
        self._watch(machine, keeper, "its keeper was gone when the controller came back")

    def _watch(self, machine: MachineId, keeper: Process | None, absent: str) -> None:
        handle = _open(keeper)
        if keeper is None or handle is None:
            self._in_vain += 1
            self._lost(machine, absent)
            return
        loop = asyncio.get_running_loop()
        self._watched[machine] = _Watched(keeper, handle, loop.time())
        self._idle.clear()
        loop.add_reader(handle, self._ended, machine)

    def _ended(self, machine: MachineId) -> None:
        watched, loop = self._watched.pop(machine), asyncio.get_running_loop()
        young = loop.time() - watched.since < SHORT_LIFE_S
        self._in_vain = self._in_vain + 1 if young else 0
        loop.remove_reader(watched.handle)
        os.close(watched.handle)
        with contextlib.suppress(ChildProcessError):  # an earlier controller's child, not ours
            os.waitpid(watched.keeper.pid, os.WNOHANG)
        if not self._watched:
            self._idle.set()
        if machine not in self._released:
            self._lost(machine, f"its keeper, pid {watched.keeper.pid}, is gone")

    def _lost(self, machine: MachineId, witness: str) -> None:
        assert self._report is not None, "watch() comes first"
        lost = MachineLost(machine=machine, witness=witness)
        # Its directory says `gone` only after the journal does, so the fact cannot get lost.
        self._report(Journalled(lost, then=lambda: self._clean(machine, witness)))

    def _clean(self, machine: MachineId, why: str) -> None:
        task = asyncio.get_running_loop().create_task(self._clean_now(machine, why))
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)

    async def _clean_now(self, machine: MachineId, why: str) -> None:
        """A controller that dies on the way leaves no `gone`, and its successor does it again."""
        paths = self._paths.machine(machine)
        try:
            await asyncio.to_thread(clean_machine, paths, self._spec, machine)
            if paths.root.exists():
                write_atomically(self._file(machine, "gone"), why.encode())
        except (EverstepError, OSError) as error:
            sys.stderr.write(f"stand-in {machine} is not wholly cleaned up: {error}\n")

    # --- what the directories say ---

    def _named(self) -> list[MachineId]:
        """Every stand-in that was ever named, in order."""
        if not self._paths.machines.is_dir():
            return []
        names = [entry.name for entry in self._paths.machines.iterdir()]
        numbers = sorted(int(name[1:]) for name in names if name[:1] == "m" and name[1:].isdigit())
        return [MachineId(f"m{number}") for number in numbers]

    def _started(self, machine: MachineId) -> bool:
        return self._paths.machine(machine).log("keeper").exists()

    def _keeper_setup(self, machine: MachineId) -> Path:
        return self._paths.machine(machine).root / SETUP_NAME

    def _file(self, machine: MachineId, name: str) -> Path:
        return self._paths.machine(machine).root / name


def _address(machine: MachineId) -> str:
    return str(FIRST_ADDRESS + int(machine[1:]))


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None


def _running_keeper(setup: Path) -> Process | None:
    """A keeper that was started and has not written its pid file yet."""
    for process in everyone():
        argv = command_line(process.pid)
        if KEEPER in argv and argv[-1] == str(setup):
            return process
    return None


def _open(keeper: Process | None) -> int | None:
    if keeper is None:
        return None
    try:
        return os.pidfd_open(keeper.pid)
    except ProcessLookupError:
        return None
