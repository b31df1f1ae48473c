"""Ends what is left of older generations on this machine, and proves it gone.

Gone means: every rank of an older generation, everything it started (data loaders, compilers, shell
pipelines), and whatever else hangs below the keeper. Spared are agent, launcher and the ranks that
it has parked, which ran nothing of the user's, and what a killed agent had looking at the machine:
if that hangs in a driver, it is no rank that remains. Zombies of which no thread lives are gone:
they hold nothing but their pid. Used by the shell for KillRanks and before it leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterable
from typing import NamedTuple

from everstep.agent.launching import Launching
from everstep.agent.this_machine import ThisMachine
from everstep.agent.watch import RankWatch
from everstep.model import Generation, Seconds
from everstep.processes import (
    Entry,
    Process,
    read_pid_file,
    send_signal,
    snapshot,
    wait_gone,
)

LOOK_AGAIN_S: Seconds = 0.5
"""Longest wait for the killed ones before looking for new children of theirs."""
LOOKS = 2
"""That find nothing, one after the other, until all is gone."""
SERVICES = ("agent", "launcher")


class Deadlines(NamedTuple):
    """How long ranks get."""

    grace_s: Seconds
    """Between SIGTERM and SIGKILL, 0 for SIGKILL at once."""
    within_s: Seconds
    """Until they must be gone."""


class Ending:
    """Kills and proves."""

    def __init__(self, here: ThisMachine, ranks: RankWatch, launching: Launching) -> None:
        self._here = here
        self._ranks = ranks
        self._launching = launching
        self._leaders: set[Process] = set()
        """Every rank seen that is not proven gone with all its session."""
        self._strays: set[Process] = set()
        """No ranks, whoever their parent is."""
        self.ended: set[Process] = set()
        """Ranks, and what they started, that were ended or have ended since it was last emptied.
        """

    def spare(self, processes: Iterable[Process]) -> None:
        """These are not to be ended, although they are the keeper's children."""
        self._strays.update(processes)

    def remember(self, leader: Process) -> None:
        """A rank's process: it leads a session whose members are to end with it."""
        self._leaders.add(leader)

    async def prove_gone(self, generation: Generation, deadlines: Deadlines) -> list[Process]:
        """Kill all that is older than `generation`; returns what is left, empty if all is gone.

        Twice nothing is nothing: one look at all processes takes time, and one that was looked at
        before its parent, which then ended by itself, would be nobody's child.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + deadlines.within_s
        if deadlines.grace_s > 0:
            await self._ask_to_end(generation, deadlines.grace_s)
        await self._launching.settle()
        looks = 0
        while looks < LOOKS:
            doomed = self._doomed(generation)
            looks = 0 if doomed else looks + 1
            if not doomed:
                continue
            if clock() >= deadline:
                return doomed
            self.ended.update(doomed)
            for process in doomed:
                with contextlib.suppress(PermissionError):  # another user's: it will be left
                    send_signal(process, signal.SIGKILL)
            wait_s = min(LOOK_AGAIN_S, max(0.0, deadline - clock()))
            await asyncio.to_thread(wait_gone, doomed, wait_s)
        kept = {watched.process for watched in self._ranks.running}
        self.ended |= self._leaders - kept
        self._leaders &= kept
        return []

    async def _ask_to_end(self, generation: Generation, grace_s: Seconds) -> None:
        """SIGTERM for the ranks alone, as torchrun does: what they started is theirs to end."""
        asked = [w.process for w in self._ranks.running if w.generation < generation]
        for process in asked:
            send_signal(process, signal.SIGTERM)
        await asyncio.to_thread(wait_gone, asked, grace_s)

    def _doomed(self, generation: Generation) -> list[Process]:
        table = snapshot()
        keeper = read_pid_file(self._here.paths.pid_file("keeper"))
        kept = {w.process.pid for w in self._ranks.running if w.generation >= generation}
        spared = kept | {os.getpid()}
        spared |= {pid for pid, entry in table.items() if entry.process in self._strays}
        # Read after the snapshot: a launcher that was just started is a service, not a stray.
        for name in SERVICES:
            service = read_pid_file(self._here.paths.pid_file(name))
            if service is not None:
                # In the launcher's session are the ranks that it has parked: they ran nothing yet.
                # A rank leaves it before it is one, and no fork is under way (settle).
                spared |= {pid for pid, entry in table.items() if entry.session == service.pid}
                spared.add(service.pid)
        roots = {
            pid
            for pid, entry in table.items()
            if (keeper is not None and entry.parent == keeper.pid)
            or self._led_by_rank(entry, table)
        }
        found = _family(table, roots - spared, spared)
        return [table[pid].process for pid in found]

    def _led_by_rank(self, entry: Entry, table: dict[int, Entry]) -> bool:
        """Whether it is in the session of a rank seen before: found without a keeper too.

        A session's number is its leader's pid, which is not given away while a member lives.
        """
        for leader in self._leaders:
            holder = table.get(leader.pid)
            reused = holder is not None and holder.process != leader
            if entry.session == leader.pid and not reused:
                return True
        return False


def _family(table: dict[int, Entry], roots: Iterable[int], spared: set[int]) -> list[int]:
    """These processes and their descendants, without the spared ones and theirs."""
    children: dict[int, list[int]] = {}
    for pid, entry in table.items():
        children.setdefault(entry.parent, []).append(pid)
    found: dict[int, None] = {}
    waiting = [pid for pid in roots if pid not in spared]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found[pid] = None
            waiting += [child for child in children.get(pid, ()) if child not in spared]
    return list(found)
