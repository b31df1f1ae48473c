"""One term of one controller: its parts put together, its first facts, its end.

Made by run.py once the term is taken. The order of the beginning matters: the journal is replayed
before anything is acted on, and nobody is told where to connect before there is somebody to answer.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from enum import Enum, auto
from pathlib import Path

from everstep import __version__
from everstep.checkpoint.tier import tier_at
from everstep.cluster.base import Cluster, JoiningHosts, Journalled
from everstep.code.store import CodeStore
from everstep.controller import look_views, version_views, views
from everstep.controller.act import Hands
from everstep.controller.agents import Agents
from everstep.controller.clock import Clock
from everstep.controller.incoming import Incoming
from everstep.controller.log import say
from everstep.controller.loop import Loop
from everstep.controller.output import OutputRing
from everstep.controller.server import Desk, Server, make_app
from everstep.core.intake import Intake
from everstep.core.quarantine import taken_away
from everstep.core.state import Phase
from everstep.events import ControllerStarted, JobSubmitted
from everstep.files import write_atomically
from everstep.journal import Index, Journal, Replayed, StoryLine, newest_term, replay
from everstep.keeper import EXIT_RELEASE
from everstep.model import JobSpec, Published
from everstep.paths import Endpoint, JobPaths, JobResult

FENCE_EVERY_S = 1.0
"""Pause between two looks for a higher term while nothing is journalled."""
REMOVED_AFTER = 10
"""Looks in a row that must miss the job's directory: a file server may blink."""
CLOSE_WITHIN_S = 5.0
"""Time for released stand-ins to end by themselves."""
VIEWERS_S = 1.0
"""Time for viewers to fetch the last lines and the result."""


class End(Enum):
    """Why this controller goes."""

    JOB_OVER = auto()
    TOLD = auto()
    """By a signal; training goes on."""
    REMOVED = auto()
    """The job's directory is gone: whoever deletes it wants to be rid of the job."""


class Controller:
    """The parts of one term, put together. Made inside the event loop."""

    def __init__(self, spec: JobSpec, paths: JobPaths, journal: Journal, url: str) -> None:
        replayed = replay(journal)
        self._spec = spec
        self._paths = paths
        self._journal = journal
        self._core = replayed.core
        self._clock = Clock(not_before=replayed.last_time)
        self._found = (*journal.notices, *_differences(replayed))
        self._loop = Loop(
            core=replayed.core, journal=journal, clock=self._clock, intake=Intake(spec.nnodes)
        )
        self._output = OutputRing(journal.term)
        self._agents = Agents(
            term=journal.term,
            spec=spec,
            post=self._loop.post,
            output=self._output,
            journalled=replayed.received,
        )
        self._cluster = _cluster(spec, paths, url)
        self._hands = Hands(
            core=replayed.core,
            journal=journal,
            agents=self._agents,
            cluster=self._cluster,
            post=self._loop.post,
        )

    async def serve(self, listener: socket.socket, url: str, token: str) -> int:
        """Until the job is over, a signal comes or the term is lost; returns the exit code."""
        self._begin()
        server = Server(make_app(self._desk(), token))
        serving = asyncio.create_task(server.run_on(listener))
        self._announce(url)
        end = await self._end(serving)
        if end is End.JOB_OVER:
            await self._end_job()
        elif end is End.REMOVED:
            await self._cluster.close(0.0)
        server.leave()
        await serving
        return 0 if end is End.TOLD else EXIT_RELEASE

    def _begin(self) -> None:
        """The first facts of a term, before any agent or person may say something."""
        self._cluster.watch(self._report)
        if self._journal.next_seq == 1:
            known = _published(self._spec)
            submitted = JobSubmitted(spec=self._spec, published=known)
            self._loop.take(Incoming(submitted), self._hands.act)
        started = ControllerStarted(term=self._journal.term, version=__version__)
        self._loop.take(Incoming(started), self._hands.act)
        if self._core.state.finish is None:
            request = self._cluster.first()
            say(str(request))
            request.send()
        for machine in self._core.state.machines:
            if taken_away(self._core.state, machine):
                self._cluster.release(machine)

    def _report(self, fact: Journalled) -> None:
        self._loop.post(Incoming(fact.event, then=fact.then))

    def _announce(self, url: str) -> None:
        term, pid = self._journal.term, os.getpid()
        write_atomically(self._paths.endpoint, Endpoint(url=url, term=term, pid=pid))
        say(f"term {term} of job {self._spec.job} listens at {url}")
        for note in self._found:
            say(note)

    async def _end(self, serving: asyncio.Task[None]) -> End:
        """Wait for a reason to go. Raises what this controller dies of."""
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        work = asyncio.create_task(self._loop.run(self._hands.act))
        others = [asyncio.create_task(stop.wait()), asyncio.create_task(self._watch_term())]
        try:
            await asyncio.wait([work, serving, *others], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, *others):
                task.cancel()
        for result in await asyncio.gather(work, *others, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        if serving.done():
            serving.result()
        if self._core.state.phase is Phase.ENDED:
            return End.JOB_OVER
        if stop.is_set():
            say("told to end; training goes on, the next controller takes over from here")
            return End.TOLD
        say(f"{self._paths.root} was removed: what runs here is ended")
        return End.REMOVED

    async def _watch_term(self) -> None:
        """Return when the directory of all terms is gone; Fenced when there is a higher one."""
        missed = 0
        while missed < REMOVED_AFTER:
            newest = newest_term(self._paths.journal)
            if newest > self._journal.term:
                self._journal.sync()  # raises, and says by whom
            missed = 0 if newest else missed + 1
            await asyncio.sleep(FENCE_EVERY_S)

    async def _end_job(self) -> None:
        """Nothing is left to decide: the last stand-ins go, viewers hear how it ended."""
        await self._cluster.close(CLOSE_WITHIN_S)
        finish = self._core.state.finish
        assert finish is not None, "the core ends only after FinishJob"
        result = JobResult(
            outcome=finish.outcome,
            exit_code=finish.exit_code,
            why=finish.why,
            detail=finish.detail,
        )
        write_atomically(self._paths.result, result)
        say(f"the job is over ({finish.outcome}): {finish.why}")
        self._output.close()
        await asyncio.sleep(VIEWERS_S)

    def _desk(self) -> Desk:
        return Desk(
            state=self._core.state,
            status=self._status,
            incidents=lambda: views.incidents(self._core.state, self._clock.now()),
            why=self._why,
            post=self._loop.post,
            output=self._output,
            agents=self._agents,
            versions=lambda: version_views.versions(self._core.state, self._clock.now()),
            store=CodeStore(self._paths.code),
            stacks=lambda after: look_views.stacks(
                self._core.state, self._clock.now(), after=after
            ),
        )

    def _status(self) -> views.StatusView:
        notes = (*self._found, *self._hands.notes(), *self._agents.notes())
        return views.status(self._core.state, self._clock.now(), notes)

    async def _why(self, subject: str) -> list[StoryLine]:
        """In a thread: after months the index may have much to catch up with."""
        return await asyncio.to_thread(_story, self._paths.journal, subject)


def _story(directory: Path, subject: str) -> list[StoryLine]:
    index = Index(directory)
    try:
        return index.story(subject)
    finally:
        index.close()


def _published(spec: JobSpec) -> tuple[Published, ...]:
    """Steps that are there already and that so many ranks can restore."""
    tier = tier_at(spec.checkpoint.directory)
    found = []
    for entry in tier.published():
        saved = tier.manifest(entry.step).world_size
        if saved == spec.world_size:
            found.append(entry)
        else:
            say(f"step {entry.step} on disk is of {saved} ranks, not {spec.world_size}: left alone")
    return tuple(found)


def _cluster(spec: JobSpec, paths: JobPaths, url: str) -> Cluster:
    if not spec.local:
        return JoiningHosts(url)
    from everstep.cluster.local import LocalCluster  # noqa: PLC0415 -- only stand-ins need it

    return LocalCluster(spec, paths)


def _differences(replayed: Replayed) -> list[str]:
    return [
        f"record {difference.seq} was decided by another version of everstep, and this one"
        f" ({__version__}) would have decided otherwise; what was decided stands"
        for difference in replayed.differences
    ]
