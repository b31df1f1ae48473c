"""The agent's access to its machine's own disk: one thing after the other, in one thread.

A disk may hang or be slow. The event loop never waits for it without limit, and what was given up
is over before anything else is done there, so that no late write undoes a removal. Used by
persist.py and effects.py. Without --local-checkpoint-dir there is nothing, and all of it is quick.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from everstep.agent.log import say
from everstep.agent.this_machine import ThisMachine
from everstep.checkpoint import local_disk
from everstep.model import Copy, EverstepError, Rank, Seconds, Step

ANSWERS_WITHIN_S: Seconds = 3.0
"""A restart waits this long for a list of what lies there: a healthy disk needs a millisecond."""

_Result = TypeVar("_Result")


class NoOwnDisk(EverstepError):
    """The step cannot be kept there; the message says why."""


class OwnDisk:
    """Of one agent."""

    def __init__(self, here: ThisMachine) -> None:
        self._shm = here.shm
        self._directory = here.local_disk
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="everstep-disk")
        self.copies: tuple[Copy, ...] = ()
        """What lay there when it was looked at last."""

    async def look(self) -> None:
        """Find out what lies there. A disk that does not answer in time has nothing."""
        self.copies = ()
        if self._directory is None:
            return
        listing = partial(local_disk.inventory, self._directory)
        try:
            self.copies = tuple(await self._soon(listing))
        except (OSError, TimeoutError) as error:
            say(f"what lies in {self._directory} is not known: {error or 'it does not answer'}")

    async def persist(self, rank: Rank, step: Step) -> None:
        """Copy a shard there. Raises what local_disk.persist() does, and NoOwnDisk."""
        given_up = Event()

        def go_on() -> None:
            if given_up.is_set():
                raise NoOwnDisk("it was called off")

        copying = partial(local_disk.persist, self._shm, rank, step, self._place(), go_on)
        try:
            await self._do(copying)
        finally:
            given_up.set()

    async def keep(self, steps: Collection[Step]) -> None:
        """Remove all other steps. Raises NoOwnDisk, OSError."""
        await self._do(partial(local_disk.keep, self._place(), steps))

    async def drop_newer(self, step: Step) -> None:
        """Remove newer steps, now or when the disk answers."""
        if self._directory is None:
            return
        try:
            await self._soon(partial(local_disk.drop_newer, self._directory, step))
        except (OSError, TimeoutError) as error:
            say(f"newer steps are not removed from {self._directory} yet: {error}")

    async def remove_all(self) -> None:
        """The machine leaves the job. A disk that does not answer keeps what it has."""
        if self._directory is not None:
            with contextlib.suppress(TimeoutError):
                await self._soon(partial(local_disk.remove_all, self._directory))

    def _place(self) -> Path:
        if self._directory is None:
            raise NoOwnDisk("this machine was given no --local-checkpoint-dir")
        return self._directory

    async def _soon(self, work: Callable[[], _Result]) -> _Result:
        async with asyncio.timeout(ANSWERS_WITHIN_S):
            return await self._do(work)

    async def _do(self, work: Callable[[], _Result]) -> _Result:
        """Given up, it is still done in its turn: what is to be removed must go."""
        doing = asyncio.wrap_future(self._thread.submit(work))
        doing.add_done_callback(_heard)
        return await asyncio.shield(doing)


def _heard(done: asyncio.Future[Any]) -> None:
    """Nobody may be left who asks whether it failed."""
    if not done.cancelled():
        done.exception()
