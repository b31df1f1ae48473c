"""Asks every source when it is time, has the monitor judge, and passes on what it says.

One task for each source, in the agent's loop. Sources that may hang are asked in a child
(children.py); the others at once, since they read a few small files. What was said is remembered
before it is passed on, so that an agent that is killed in between says nothing twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec

from everstep.agent.checks.check import AnyCheck, AnySource, Here, Stamped
from everstep.agent.checks.children import Child, Unanswered, clock
from everstep.agent.checks.judging import Failed, attempt
from everstep.agent.checks.memory import ChecksMemory
from everstep.agent.checks.metrics import Seen, SourceCounts
from everstep.agent.checks.monitor import Monitor, Said
from everstep.agent.log import say
from everstep.health import Result
from everstep.model import MachineId, Seconds
from everstep.processes import Process, send_signal

SPREAD_S: Seconds = 1.0
"""First samples are spread over this, so that sources neither bunch here nor meet those of all
other machines at one address."""
ABSENT_AGAIN_S: Seconds = 120.0
"""Between two questions whether a signal has come to exist: a device that was plugged in, a node
service that was started."""
REMEMBER_EVERY_S: Seconds = 5.0
"""Between two writes while nothing is said: what a killed agent may lose of its baselines."""
PAUSE_MIN_S: Seconds = 0.02
"""Between two looks of a source that is told of news: fifty looks a second, and what floods it is
read in fewer, larger parts."""
ERROR_PAUSE_S: Seconds = 1.0
"""Least pause after a sample that could not be taken."""

NOTED_MAX = 100
"""Lines in the agent's log about sources that are defective or cannot be read."""


class Job(NamedTuple):
    """What the runner is made for."""

    machine: MachineId
    here: Callable[[], Here]
    """The machine as it is now."""
    directory: Path
    """Of the machine: children are known by it."""
    tell: Callable[[tuple[Said, ...]], None]
    """Takes what is to be said to the controller."""


class Runner:
    """All sources of one machine."""

    def __init__(
        self,
        job: Job,
        checks: list[AnyCheck],
        sources: Mapping[str, AnySource],
        memory: ChecksMemory,
    ) -> None:
        """Checks without source are left out."""
        self.counts: dict[str, SourceCounts] = {}
        self._job = job
        self._memory = memory
        remembered, children = memory.read(sources)
        checks = [check for check in checks if check.source in sources]
        self._monitor = Monitor(job.machine, checks, remembered)
        self._sources = {name: sources[name] for name in self._monitor.sources}
        self.left_behind = [kept.process for kept in children.values()]
        """Children of a former agent: they take samples, or hang; no ranks."""
        self._useless = {n: kept for n, kept in children.items() if n not in self._sources}
        """Children whose source nobody needs any more, or that is no longer asked in one."""
        self._children: dict[str, Child] = {}
        for name, source in self._sources.items():
            self.counts[name] = SourceCounts()
            if source.blocks:
                former = children.get(name)
                self._children[name] = Child(source, job.directory, former, self._remember)
        self._noted: set[str] = set()
        self._unseen = set(self._sources)
        self.looked = asyncio.Event()
        """Set once every source was asked, whatever came of it."""
        if not self._unseen:
            self.looked.set()

    @property
    def monitor(self) -> Monitor:
        return self._monitor

    @property
    def children(self) -> dict[str, Process]:
        """Of every source that has one now."""
        found = {name: child.process for name, child in self._children.items()}
        return {name: process for name, process in found.items() if process is not None}

    async def run(self) -> NoReturn:
        """Until cancelled."""
        self._say(self._monitor.told_again(clock()))
        for kept in self._useless.values():
            send_signal(kept.process, signal.SIGKILL)
        async with asyncio.TaskGroup() as tasks:
            for source in self._sources.values():
                tasks.create_task(self._follow(source))
            while True:
                await asyncio.sleep(REMEMBER_EVERY_S)
                self._remember()

    def seen(self) -> Seen:
        """For metrics."""
        monitor = self._monitor
        return Seen(
            now=clock(),
            results=[each for results in monitor.latest.values() for each in results],
            alerts=monitor.alerts(),
            could_not_run=monitor.could_not_run,
            defects=monitor.defects,
            sources=self.counts,
        )

    # --- one source ---

    async def _follow(self, source: AnySource) -> NoReturn:
        await asyncio.sleep(_chance() * min(SPREAD_S, source.every_s))
        await self._present(source)
        due = time.monotonic()
        while True:
            good = await self._look(source)
            self._seen_once(source)
            pause_s = PAUSE_MIN_S if good else ERROR_PAUSE_S
            due = next_due(due, source.every_s, time.monotonic() + pause_s)
            await asyncio.sleep(pause_s)
            await self._until(source, due)
            due = min(due, time.monotonic())  # there was news before it was time

    def _seen_once(self, source: AnySource) -> None:
        self._unseen.discard(source.name)
        if not self._unseen:
            self.looked.set()

    async def _present(self, source: AnySource) -> None:
        """Wait until there is something to read. What was there once is read whatever happened.

        It is asked in any case: some learn then what they will say if their child is silent.
        """
        counts = self.counts[source.name]
        while True:
            absent = attempt(lambda: source.absent(self._job.here()))
            counts.absent = absent.why if isinstance(absent, Failed) else absent
            if counts.absent:
                self._seen_once(source)
            if self._monitor.has_sampled(source.name):
                counts.absent = ""
            if not counts.absent:
                return
            await asyncio.sleep(ABSENT_AGAIN_S)

    async def _until(self, source: AnySource, due: Seconds) -> None:
        """Until this time, or until the source has news if it can tell."""
        fd = None if source.blocks else attempt(lambda: source.fileno(self._job.here()))
        wait_s = max(0.0, due - time.monotonic())
        if fd is None or isinstance(fd, Failed):
            await asyncio.sleep(wait_s)
            return
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        try:
            loop.add_reader(fd, news.set)
        except (OSError, ValueError):  # a file that cannot be waited for, or is closed
            await asyncio.sleep(wait_s)
            return
        try:
            async with asyncio.timeout(wait_s):
                await news.wait()
        except TimeoutError:
            pass
        finally:
            loop.remove_reader(fd)

    async def _look(self, source: AnySource) -> bool:
        """Take one sample and have it judged; whether there was one."""
        counts, name = self.counts[source.name], source.name
        began, cpu_began = time.monotonic(), time.thread_time()
        here, child = self._job.here(), self._children.get(name)
        taken: Any
        if child is None:
            taken = attempt(lambda: source.sample(here))
        else:
            cpu_before = child.cpu_s
            answer = await child.ask(here)
            cpu_began = time.thread_time()
            counts.cpu_seconds += child.cpu_s - cpu_before
            taken = _decoded(answer, source) if isinstance(answer, bytes) else answer
        at = clock()
        good = not isinstance(taken, Failed | Unanswered)
        if isinstance(taken, Failed):
            counts.not_sampled += 1
            self._note(name, taken)
            said = self._monitor.not_sampled(name, taken.why, at)
        elif isinstance(taken, Unanswered):
            counts.unanswered += 1
            said = self._monitor.unanswered(name, self._meaning(source, taken), taken.why, at)
        else:
            counts.samples += 1
            counts.newest_at = at
            said = self._monitor.sampled(name, here, Stamped(at=at, sample=taken))
        self._say(said)
        counts.seconds += time.monotonic() - began
        counts.cpu_seconds += time.thread_time() - cpu_began
        return good

    def _meaning(self, source: AnySource, silence: Unanswered) -> Result | None:
        """What the source says of the silence of its child."""
        result = attempt(lambda: source.unanswered(silence.for_s, silence.times))
        if isinstance(result, Failed):
            self._note(source.name, result)
            return None
        return result

    def _note(self, name: str, failed: Failed) -> None:
        """Each defect once, and once for each source that it cannot be read: it will be the same
        every two seconds. The controller is told of the latter when it has lasted.
        """
        about = failed.why if failed.defect else name
        if about not in self._noted and len(self._noted) < NOTED_MAX:
            self._noted.add(about)
            say(f"checks: source {name}: {failed.why}")

    # --- what is said ---

    def _say(self, said: list[Said]) -> None:
        if said:
            self._remember()
            self._job.tell(tuple(said))

    def _remember(self) -> None:
        kept = {name: child.kept for name, child in self._children.items()}
        children = {name: each for name, each in kept.items() if each is not None}
        self._memory.write(self._monitor.remembered(), {**self._useless, **children})

    async def close(self) -> None:
        """End the children, as far as they can be ended."""
        for child in self._children.values():
            with contextlib.suppress(OSError):
                await child.close()


def next_due(due: Seconds, every_s: Seconds, earliest: Seconds) -> Seconds:
    """The next time on the grid of `every_s` that is not before `earliest`: late does not drift."""
    if every_s <= 0:
        return earliest
    return due + every_s * max(1, math.ceil((earliest - due) / every_s))


def _chance() -> float:
    return int.from_bytes(os.urandom(4), "little") / (1 << 32)


def _decoded(answer: bytes, source: AnySource) -> Any:
    return attempt(lambda: msgspec.msgpack.decode(answer, type=source.kind))
