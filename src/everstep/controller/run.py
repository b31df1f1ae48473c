"""One controller from its start to its end: takes a term, replays, serves, and leaves.

Called by __main__.py. The order of the start matters: nothing of the job is touched before a term
is taken, nothing is acted on before the journal is replayed, and nobody is told where to connect
before there is somebody to answer.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from enum import Enum, auto
from pathlib import Path

from everstep import __version__
from everstep.checkpoint.disk import published
from everstep.cluster.base import Cluster, JoiningHosts, Journalled
from everstep.controller import views
from everstep.controller.act import Hands
from everstep.controller.agents import Agents
from everstep.controller.clock import Clock
from everstep.controller.incoming import Incoming
from everstep.controller.listening import CannotListen, former_port, listen, url_of
from everstep.controller.living import living_controller
from everstep.controller.log import say
from everstep.controller.loop import Loop
from everstep.controller.output import OutputRing
from everstep.controller.server import Desk, Server, make_app
from everstep.core.intake import Intake
from everstep.core.state import Phase
from everstep.events import ControllerStarted, JobSubmitted
from everstep.files import read_json, write_atomically
from everstep.journal import (
    Index,
    Journal,
    Replayed,
    StoryLine,
    newest_term,
    replay,
    take_term,
)
from everstep.keeper import EXIT_RELEASE
from everstep.model import JobId, JobSpec, UserError, Value
from everstep.paths import Endpoint, JobPaths, JobResult

STAND_BY_S = 1.0
"""Pause between two looks of a controller that waits for the end of another one."""
FENCE_EVERY_S = 1.0
"""Pause between two looks for a higher term while nothing is journalled."""
REMOVED_AFTER = 10
"""Looks in a row that must miss the job's directory: a file server may blink."""
PORT_FREE_WITHIN_S = 3.0
"""Time for a controller that was just fenced to let go of the port that was asked for."""
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


class ControllerAlive(UserError):
    """There is a controller already, and nobody said to replace it."""

    exit_code = 1


class JobOver(UserError):
    """The job has a result: there is nothing to control."""


class Options(Value, frozen=True, kw_only=True):
    """The command line."""

    job_dir: str
    resume: bool = False
    """Replace a living controller."""
    resume_if_needed: bool = False
    """Wait for the end of a living controller, then go on: what a keeper starts."""
    host: str = "127.0.0.1"
    port: int = 0


def run(options: Options) -> int:
    """Control the job until it is over; returns the exit code.

    EXIT_RELEASE if the job is over, 0 after SIGTERM or SIGINT (training goes on). EverstepError
    with one sentence for everything that keeps the controller from its work.
    """
    root = Path(options.job_dir).absolute()
    spec = read_json(root / "spec.json", JobSpec)
    paths = JobPaths(root.parent, JobId(root.name))  # renamed if a later job took its name
    token = _read_token(paths)
    _await_turn(paths, spec.job, token, options)
    if paths.result.exists():
        if options.resume_if_needed:
            return EXIT_RELEASE  # its keeper does not know yet
        raise JobOver(f"job {spec.job} is over (see {paths.result}): start a new one")
    _check_port(paths, options)
    term = take_term(paths.journal, f"pid {os.getpid()} on {socket.gethostname()}")
    journal = Journal(paths.journal, term, version=__version__)
    return asyncio.run(_serve(spec, paths, journal, token, options))


async def _serve(
    spec: JobSpec, paths: JobPaths, journal: Journal, token: str, options: Options
) -> int:
    listener = await _listen(paths, options)
    url = url_of(listener, options.host)
    return await _Controller(spec, paths, journal, url).serve(listener, url, token)


class _Controller:
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
            policy=spec.policy,
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
        if self._journal.next_seq == 1:
            known = tuple(published(Path(self._spec.checkpoint.directory)))
            submitted = JobSubmitted(spec=self._spec, published=known)
            self._loop.take(Incoming(submitted), self._hands.act)
        started = ControllerStarted(term=self._journal.term, version=__version__)
        self._loop.take(Incoming(started), self._hands.act)
        request = self._cluster.start(self._report)
        if self._core.state.finish is None:
            say(str(request))
            request.send()
        for machine in self._core.state.machines.values():
            if machine.evicted:
                self._cluster.release(machine.machine)

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
        )

    def _status(self) -> views.StatusView:
        notes = (*self._found, *self._agents.notes(), *self._hands.pages)
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


def _read_token(paths: JobPaths) -> str:
    try:
        return paths.token.read_text().strip()
    except OSError as error:
        raise UserError(
            f"cannot read the job's token {paths.token}: {error.strerror}; run the controller as"
            " the user who submitted the job"
        ) from error


def _await_turn(paths: JobPaths, job: JobId, token: str, options: Options) -> None:
    """Return when this controller may take the next term."""
    said = False
    while not options.resume and (living := living_controller(paths, job, token)) is not None:
        if not options.resume_if_needed:
            raise ControllerAlive(
                f"job {job} has a living controller at {living.url} (term"
                f" {living.term}, pid {living.pid}): add --resume to replace it"
            )
        if not said:
            say(f"the controller at {living.url} lives: waiting here to take over from it")
            said = True
        time.sleep(STAND_BY_S)


def _check_port(paths: JobPaths, options: Options) -> None:
    """Refuse a port that cannot be had before anything of the job is touched.

    The exception is the port of the controller that is about to be replaced.
    """
    if options.port and not (options.resume and options.port == former_port(paths)):
        listen(paths, options.host, options.port).close()


async def _listen(paths: JobPaths, options: Options) -> socket.socket:
    """Listen; a controller that was just fenced off needs a moment to let go of its port."""
    deadline = time.monotonic() + PORT_FREE_WITHIN_S
    while True:
        try:
            return listen(paths, options.host, options.port)
        except CannotListen as error:
            if not error.in_use or time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)
