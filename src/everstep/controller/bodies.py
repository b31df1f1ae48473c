"""What requests bring: bodies within limits, numbers, and a body as a file for a thread to read.

Used by server.py and code.py. What is wrong with a request is an HTTPException with one sentence.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request

STALL_S = 60.0
"""Who sends a body and then nothing for so long is gone."""
_Body = TypeVar("_Body")


async def limited_body(request: Request, limit: int) -> bytes:
    """All of it; 413 if it is longer."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise HTTPException(413, f"a body may have {limit} bytes: send less")
        parts.append(part)
    return b"".join(parts)


def decoded(body: bytes, of: type[_Body]) -> _Body:
    """400 if it is not what it should be."""
    try:
        return msgspec.json.decode(body, type=of)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise HTTPException(400, f"the request's body is not what it should be: {error}") from error


def number(request: Request, name: str) -> float:
    """A number of the query, 0 if it is not there."""
    text = request.query_params.get(name, "0")
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise HTTPException(400, f"{name}={text} is not a number from 0 on")
    return found


class TooLong(Exception):
    """A body goes on beyond its limit."""


class BodyFile:
    """A body that a thread reads as a file while the event loop receives it.

    The thread asks for each part, so no more of it is in memory than one part.
    """

    def __init__(self, request: Request, limit: int) -> None:
        """To be made in the event loop that serves the request."""
        self._parts: AsyncIterator[bytes] = aiter(request.stream())
        self._loop = asyncio.get_running_loop()
        self._limit = limit
        self._taken = 0
        self._rest = b""

    def read(self, count: int, /) -> bytes:
        """The next `count` bytes; fewer only at its end.

        Raises TooLong, TimeoutError, starlette's ClientDisconnect.
        """
        pieces, missing = [], count
        while missing:
            if not self._rest:
                self._rest = self._next()
            if not self._rest:
                break
            piece, self._rest = self._rest[:missing], self._rest[missing:]
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)

    def _next(self) -> bytes:
        part = asyncio.run_coroutine_threadsafe(self._received(), self._loop).result()
        self._taken += len(part)
        if self._taken > self._limit:
            raise TooLong
        return part

    async def _received(self) -> bytes:
        """The next part that is not empty; empty at the end."""
        async with asyncio.timeout(STALL_S):
            async for part in self._parts:
                if part:
                    return part
        return b""

    async def skip(self) -> None:
        """Read on to the end, as far as the limit goes: who still sends does not hear an answer."""
        while self._taken <= self._limit:
            part = await self._received()
            if not part:
                return
            self._taken += len(part)
