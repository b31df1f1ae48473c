"""Looks at a machine once, with some checks at the same time, each with a fresh sample.

Used by `everstep check`, and by the agent for a test of an evicted machine (agent/testing.py). The
runner (runner.py) is what looks again and again. What may hang is asked in a child of its own;
whoever gives no answer in time could not be read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from everstep.agent.checks.check import AnyCheck, AnySource, Here, Stamped
from everstep.agent.checks.children import Child, Unanswered, clock
from everstep.agent.checks.judging import Failed, attempt
from everstep.agent.checks.memory import KeptChild
from everstep.agent.checks.monitor import Monitor
from everstep.agent.checks.registry import make_source
from everstep.health import Result
from everstep.model import Seconds

BETWEEN_S: Seconds = 1.0
"""Between two looks of a source that was never looked at: a rate per second needs no more."""


class Looking:
    """One look. The monitor judges, and may remember samples of before."""

    def __init__(
        self,
        checks: Sequence[AnyCheck],
        monitor: Monitor,
        directory: Path,
        former: Mapping[str, KeptChild] | None = None,
    ) -> None:
        """Children are known by `directory`; `former`: those of an earlier look."""
        self.absent: dict[str, str] = {}
        """Sources that this machine does not have, and why."""
        self.late: list[str] = []
        """Sources that gave no answer in time."""
        self.children: dict[str, Child] = {}
        self._monitor = monitor
        self._directory = directory
        self._former = former or {}
        self._sources = {name: make_source(name) for name in {each.source for each in checks}}

    @property
    def results(self) -> list[Result]:
        """All that was found, by source after source."""
        return [each for found in self._monitor.latest.values() for each in found]

    async def look(self, here: Here, within_s: Seconds, late: str) -> None:
        """Every source in parallel. `late`: what is said of those that are."""
        tasks = {name: asyncio.create_task(self._look(name, here)) for name in self._sources}
        try:
            async with asyncio.timeout(within_s):
                await asyncio.gather(*tasks.values())
        except TimeoutError:
            self.late = [name for name, task in tasks.items() if task.cancelled()]
            for name in self.late:
                self._monitor.not_sampled(name, late, clock())

    async def close(self) -> None:
        """End the children, as far as they can be ended."""
        await asyncio.gather(*(child.close() for child in self.children.values()))

    async def _look(self, name: str, here: Here) -> None:
        source = self._sources[name]
        why = attempt(lambda: source.absent(here))
        if isinstance(why, Failed):
            self._monitor.not_sampled(name, why.why, clock())
        elif why:
            self.absent[name] = why
        else:
            fresh = not self._monitor.has_sampled(name)
            if await self._once(name, source, here) and fresh and source.every_s > 0:
                await asyncio.sleep(BETWEEN_S)
                await self._once(name, source, here)

    async def _once(self, name: str, source: AnySource, here: Here) -> bool:
        """Whether there was a sample."""
        sample = await self._sample(name, source, here)
        if isinstance(sample, Failed):
            self._monitor.not_sampled(name, sample.why, clock())
        elif isinstance(sample, Unanswered):
            said = attempt(lambda: source.unanswered(sample.for_s, sample.times))
            meaning = None if isinstance(said, Failed) else said
            self._monitor.unanswered(name, meaning, sample.why, clock())
        else:
            self._monitor.sampled(name, here, Stamped(at=clock(), sample=sample))
        return not isinstance(sample, Failed | Unanswered)

    async def _sample(self, name: str, source: AnySource, here: Here) -> Any:
        if not source.blocks:
            return attempt(lambda: source.sample(here))
        if name not in self.children:
            former = self._former.get(name)
            self.children[name] = Child(source, self._directory, former, lambda: None)
        answer = await self.children[name].ask(here)
        if isinstance(answer, Failed | Unanswered):
            return answer
        return attempt(lambda: msgspec.msgpack.decode(answer, type=source.kind))
