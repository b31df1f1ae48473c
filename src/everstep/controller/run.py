"""The start of a controller: whether it may, and under which term. What follows is term.py's.

Called by __main__.py. Nothing of the job is touched before a term is taken.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path

from everstep import __version__
from everstep.controller.listening import CannotListen, former_port, listen, url_of
from everstep.controller.living import living_controller
from everstep.controller.log import say
from everstep.controller.term import Controller
from everstep.files import read_json
from everstep.journal import (
    Journal,
    take_term,
)
from everstep.keeper import EXIT_RELEASE
from everstep.model import JobId, JobSpec, UserError, Value
from everstep.paths import JobPaths

STAND_BY_S = 1.0
"""Pause between two looks of a controller that waits for the end of another one."""
PORT_FREE_WITHIN_S = 3.0
"""Time for a controller that was just fenced to let go of the port that was asked for."""


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
    return await Controller(spec, paths, journal, url).serve(listener, url, token)


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
