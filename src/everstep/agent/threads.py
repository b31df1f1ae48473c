"""Transfers in threads: started together, ended together, and never two over the same slots.

The agent's event loop waits here without being blocked. When the wait is given up (a new
generation, a newer order, one transfer that failed), all are cancelled, and who comes next waits
until the last thread of them has let go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from everstep.agent.transfer.channel import Cancel

_Result = TypeVar("_Result")


class Crew:
    """The threads for one kind of transfer."""

    def __init__(self, most: int) -> None:
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="everstep-transfer")
        self._busy: set[Future[Any]] = set()

    async def all(self, works: Sequence[Callable[[], _Result]], cancel: Cancel) -> list[_Result]:
        """Do all of it at once. Raises what the first of them raised that failed.

        `cancel` must end the works; it is used as soon as one has failed or nobody waits any more.
        """
        await self.idle()
        futures = [self._pool.submit(work) for work in works]
        self._busy.update(futures)
        try:
            return await asyncio.gather(*map(asyncio.wrap_future, futures))
        finally:
            cancel.cancel()

    def close(self) -> None:
        """Take no more work; cancelled works end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def idle(self) -> None:
        """Wait for what was given up before: it was cancelled, and ends within moments."""
        self._busy = {future for future in self._busy if not future.done()}
        if self._busy:
            left = [asyncio.wrap_future(future) for future in self._busy]
            await asyncio.gather(*left, return_exceptions=True)
