"""Watches the ranks of this machine: the kernel says when one ends, the keeper says how.

One pidfd per rank, so an end is noticed at once and a reused pid never is one. The shell (and
adoption after a restart of the agent) says which processes are ranks; what is posted is RankExited,
once for each of them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from everstep.agent.exits import Exits, last_lines, read_error
from everstep.agent.this_machine import ThisMachine
from everstep.events import RankExited
from everstep.model import ExitStatus, Generation, Rank, RankStatus, Seconds
from everstep.processes import Process, alive, read_pid_file

NOTED_WITHIN_S: Seconds = 2.0
"""Patience with a keeper that lives and has not noted a dead child; it takes a millisecond."""

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Starts a task whose failure ends the agent."""


class Watched(NamedTuple):
    """A rank that was started here."""

    rank: Rank
    generation: Generation
    process: Process

    def status(self, exit: ExitStatus | None = None) -> RankStatus:  # noqa: A002 -- its name there
        return RankStatus(
            rank=self.rank, generation=self.generation, pid=self.process.pid, exit=exit
        )


class RankWatch:
    """All ranks that run, and those whose end is being looked into."""

    def __init__(self, here: ThisMachine, post: Callable[[RankExited], None], spawn: Spawn) -> None:
        self._here = here
        self._post = post
        self._spawn = spawn
        self._exits = Exits(here.paths.exits)
        self._handles: dict[Watched, int] = {}
        self._ending: dict[Watched, asyncio.Task[None]] = {}

    def exit_of(self, process: Process) -> ExitStatus:
        """How a process ended that is known to be gone; unknown if nobody noted it."""
        return self._exits.of(process) or ExitStatus()

    @property
    def running(self) -> list[Watched]:
        """Ranks whose process has not ended, in the order in which they came."""
        return list(self._handles)

    def add(self, watched: Watched) -> None:
        """Watch this process from now on; if it is gone already, its end is told soon."""
        try:
            handle = os.pidfd_open(watched.process.pid)
        except ProcessLookupError:
            self._ended(watched)
            return
        if not alive(watched.process):  # the pid is another process's by now, or a zombie's
            os.close(handle)
            self._ended(watched)
            return
        self._handles[watched] = handle
        asyncio.get_running_loop().add_reader(handle, self._readable, watched)

    async def all_told(self) -> None:
        """Wait until the end of every rank that has ended is posted."""
        if self._ending:
            await asyncio.wait(self._ending.values())

    def _readable(self, watched: Watched) -> None:
        handle = self._handles.pop(watched)
        asyncio.get_running_loop().remove_reader(handle)
        os.close(handle)
        self._ended(watched)

    def _ended(self, watched: Watched) -> None:
        task = self._spawn(self._tell(watched))
        self._ending[watched] = task
        task.add_done_callback(lambda _: self._ending.pop(watched))

    async def _tell(self, watched: Watched) -> None:
        clock = asyncio.get_running_loop().time
        noticed = clock()
        status = await self._status(watched.process, noticed + NOTED_WITHIN_S)
        paths = self._here.paths
        self._post(
            RankExited(
                machine=self._here.setup.machine,
                generation=watched.generation,
                rank=watched.rank,
                exit=status,
                age_s=clock() - noticed,
                error=read_error(paths.error_file(watched.generation, watched.rank)),
                last_lines=last_lines(paths.rank_log(watched.generation, watched.rank)),
            )
        )

    async def _status(self, process: Process, deadline: float) -> ExitStatus:
        pause_s = 0.0005
        keeper = self._here.paths.pid_file("keeper")
        while True:
            # Asked before the file is read: a keeper that is dead now has written all it will.
            last = read_pid_file(keeper) is None or asyncio.get_running_loop().time() > deadline
            status = self._exits.of(process)
            if status is not None:
                return status
            if last:
                return ExitStatus()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)
