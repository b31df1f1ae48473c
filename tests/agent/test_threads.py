"""Transfers in threads never overlap those that were given up before."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from everstep.agent.threads import Crew
from everstep.agent.transfer.channel import Cancel


def test_who_comes_next_waits_until_the_last_thread_has_let_go() -> None:
    """The first work does not end when it is cancelled, but when it is allowed to."""
    crew, begun, let_go = Crew(2), threading.Event(), threading.Event()
    log: list[str] = []

    def stubborn() -> None:
        log.append("begun")
        begun.set()
        let_go.wait(10)
        log.append("ended")

    async def story() -> None:
        first = asyncio.create_task(crew.all([stubborn], Cancel()))
        assert await asyncio.to_thread(begun.wait, 10)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.create_task(crew.all([lambda: log.append("second")], Cancel()))
        await asyncio.sleep(0.02)
        assert log == ["begun"]
        let_go.set()
        await second

    asyncio.run(story())
    assert log == ["begun", "ended", "second"]
    crew.close()


def test_one_that_fails_cancels_the_others_and_is_the_one_that_is_told() -> None:
    crew, cancel = Crew(2), Cancel()

    def fails() -> int:
        raise OSError("no room")

    def waits() -> int:
        deadline = time.monotonic() + 10
        while not cancel.cancelled and time.monotonic() < deadline:
            time.sleep(0.001)
        return 1

    async def story() -> None:
        with pytest.raises(OSError, match="no room"):
            await crew.all([waits, fails], cancel)
        await crew.idle()

    asyncio.run(story())
    assert cancel.cancelled
    crew.close()
