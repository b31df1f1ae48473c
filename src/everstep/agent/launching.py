"""Has the launcher fork: the agent's end of the socket that agent/launcher.py serves.

One request at a time. A launcher that is being started again by the keeper is waited for. A request
that was sent and not answered is a failure of that start, never repeated: ranks may exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from everstep.agent import fork
from everstep.agent.fork import (
    ForkReply,
    ForkRequest,
    MessageBroken,
    Request,
    TryReply,
    TryRequest,
)
from everstep.model import EverstepError, Seconds
from everstep.processes import read_pid_file, send_signal

RETRY_S: Seconds = 0.02
SETTLE_S: Seconds = 2.0
"""Time for a fork under way to end before the launcher is killed; it takes some 50 ms."""
TRIED_LATE_S: Seconds = 5.0
"""After its time, for a trial to be ended and to say so."""
_Reply = TypeVar("_Reply", ForkReply, TryReply)


class NotForked(EverstepError):
    """The launcher did not fork all ranks; the message says why."""


class Launching:
    """The launcher of this machine, as the agent sees it."""

    def __init__(self, path: Path, pid_file: Path) -> None:
        self._path = path
        self._pid_file = pid_file
        self._busy = asyncio.Lock()

    async def fork(self, request: ForkRequest, within_s: Seconds) -> ForkReply:
        """Raises NotForked; then some ranks may exist all the same, and must be killed."""
        async with self._busy:
            try:
                async with asyncio.timeout(within_s):
                    reader, writer = await self._connect()
                    with contextlib.closing(writer):
                        reply = await _ask(reader, writer, request, ForkReply)
            except TimeoutError:
                raise NotForked(
                    f"the launcher did not answer within {within_s:g} s: see launcher.log in"
                    f" {self._pid_file.parent}"
                ) from None
            except (OSError, MessageBroken) as error:
                raise NotForked(f"the launcher died while it forked ranks ({error})") from None
        if reply.problem:
            raise NotForked(reply.problem)
        return reply

    async def settle(self) -> None:
        """Return when no fork is under way; a launcher that does not finish is killed.

        Its single thread serves one connection after the other, so its greeting is the proof. This
        holds also for a request of an agent that died since.
        """
        try:
            async with asyncio.timeout(SETTLE_S):
                _, writer = await self._greeted()
                writer.close()
        except TimeoutError:
            launcher = read_pid_file(self._pid_file)
            if launcher is not None:
                send_signal(launcher, signal.SIGKILL)
        except (OSError, MessageBroken):
            return  # it is not there, or died now

    async def wait_warm(self) -> None:
        """Return when the launcher is ready to work."""
        _, writer = await self._connect()
        writer.close()

    async def attempt(self, request: TryRequest) -> TryReply:
        """Raises NotForked. The launcher is free meanwhile, and so are we: starts do not wait.

        The process that tries ends with this connection, and soon after the request's time. What
        it takes a launcher to get warm is part of that time: nobody waits for longer.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + request.within_s
        try:
            async with asyncio.timeout_at(deadline + TRIED_LATE_S):
                reader, writer = await self._connect()
                with contextlib.closing(writer):
                    left = replace(request, within_s=max(0.0, deadline - clock()))
                    return await _ask(reader, writer, left, TryReply)
        except TimeoutError:
            raise NotForked(f"the launcher did not try it within {request.within_s:g} s") from None
        except (OSError, MessageBroken) as error:
            raise NotForked(f"the process that tried it was ended ({error})") from None

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            with contextlib.suppress(OSError, MessageBroken):
                return await self._greeted()
            await asyncio.sleep(RETRY_S)

    async def _greeted(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that the launcher has begun to serve."""
        reader, writer = await asyncio.open_unix_connection(self._path)
        with contextlib.ExitStack() as unless_greeted:
            unless_greeted.callback(writer.close)
            try:
                greeting = await reader.readexactly(len(fork.GREETING))
            except asyncio.IncompleteReadError as error:
                greeting = error.partial
            if greeting != fork.GREETING:
                raise MessageBroken(f"the launcher greeted with {greeting!r}")
            unless_greeted.pop_all()
        return reader, writer


async def _ask(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    request: Request,
    kind: type[_Reply],
) -> _Reply:
    writer.write(fork.frame(request))
    await writer.drain()
    try:
        header = await reader.readexactly(fork.LENGTH.size)
        return fork.parse(await reader.readexactly(fork.length_of(header)), kind)
    except asyncio.IncompleteReadError:
        raise MessageBroken("the connection ended") from None
