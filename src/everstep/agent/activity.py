"""Whether the ranks of this machine do anything, whatever they report of themselves.

Used by the shell. Once a second it looks at the processor time of ranks and their children, at the
size of their logs and at the bytes that the network carried: a few files for each rank. A job that
hangs is quiet in all of that, whether or not its script is attached.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from everstep.agent.tracing.kernel import entry
from everstep.agent.traffic import Counters, Kind, Sample, Traffic, grown
from everstep.agent.watch import Watched
from everstep.core.agent_io import ActivityRead
from everstep.model import NO_GENERATION, Generation, Rank, Seconds
from everstep.processes import Process, descendants

EVERY_S: Seconds = 1.0
"""Between two looks."""
IDLE_SHARE = 0.02
"""Of one core, for each rank and its children: ranks that use less do nothing. One that waits in a
collective of gloo sleeps; the library's own threads use far less than this."""
SILENT_BYTES_PER_S = 16 << 10
"""For each rank: less is no traffic of training. Keep-alives, ssh and monitoring stay below."""
CHILDREN_FROM_S: Seconds = 3.0
"""Ranks that are idle for so long: see whether children work that are not known yet. That looks at
all processes of the host; while training goes on it is spared."""
CHILDREN_EVERY_S: Seconds = 5.0
BLIND_S: Seconds = 5.0
"""Between two looks, or since the last answer of counters: what was meanwhile cannot be told."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class _Last(NamedTuple):
    """When something was seen last (time.monotonic)."""

    look: Seconds
    output: Seconds
    busy: Seconds


class Activity:
    """Of the ranks that run here, of one generation."""

    def __init__(
        self, log: Callable[[Generation, Rank], Path], count: Callable[[], Counters]
    ) -> None:
        """`log`: the file with a rank's output. `count`: the bytes of this machine's network."""
        self._log = log
        self._traffic = Traffic(count)
        self._begin_anew(NO_GENERATION, 0.0)

    def _begin_anew(self, generation: Generation, now: Seconds) -> None:
        self._generation = generation
        self._last = _Last(now, now, now)
        self._ticks: dict[Process, int] = {}
        self._children: list[Process] = []
        self._children_at = now
        self._sizes: dict[Rank, int] = {}
        self._sample: Sample | None = None
        self._carried: dict[Kind, Seconds] = {}
        """When there was traffic last, of what has carried any."""

    async def run(
        self, running: Callable[[], Sequence[Watched]], post: Callable[[ActivityRead], None]
    ) -> NoReturn:
        """Look until cancelled."""
        while True:
            read = self.look(running(), time.monotonic())
            if read is not None:
                post(read)
            await asyncio.sleep(EVERY_S)

    def look(self, ranks: Sequence[Watched], now: Seconds) -> ActivityRead | None:
        """Look at these ranks, all of one generation. None: there are none, or not seen before."""
        if not ranks:
            self._begin_anew(NO_GENERATION, now)
            return None
        self._traffic.begin()
        generation = ranks[0].generation
        first = generation != self._generation or now - self._last.look > BLIND_S
        if first:
            self._begin_anew(generation, now)
        elapsed_s = now - self._last.look
        busy = self._worked([each.process for each in ranks], now) > (
            IDLE_SHARE * len(ranks) * elapsed_s
        )
        self._last = _Last(
            look=now,
            output=now if self._printed(ranks) else self._last.output,
            busy=now if busy else self._last.busy,
        )
        self._take_traffic(len(ranks))
        return None if first else self._read(now)

    def _read(self, now: Seconds) -> ActivityRead:
        idle_s, no_traffic_s = now - self._last.busy, self._no_traffic_s(now)
        still_s = max(idle_s, no_traffic_s or 0.0)
        return ActivityRead(
            generation=self._generation,
            quiet_s=min(now - self._last.output, still_s),
            no_traffic_s=no_traffic_s,
            idle_s=idle_s,
        )

    def _printed(self, ranks: Iterable[Watched]) -> bool:
        """Whether a log has another size than before."""
        sizes = {each.rank: _size(self._log(each.generation, each.rank)) for each in ranks}
        changed, self._sizes = sizes != self._sizes, sizes
        return changed

    def _worked(self, ranks: list[Process], now: Seconds) -> Seconds:
        """Processor time since the last look. What is met for the first time begins at nought."""
        due = now - self._children_at >= CHILDREN_EVERY_S
        if due and now - self._last.busy >= CHILDREN_FROM_S:
            self._children_at = now
            self._children = descendants(ranks)
        ticks = {each: _ticks_of(each) for each in (*ranks, *self._children)}
        known = {each: used for each, used in ticks.items() if used is not None}
        worked = sum(used - self._ticks.get(each, used) for each, used in known.items())
        self._ticks = known
        self._children = [each for each in self._children if each in known]
        return worked * _TICK_S

    def _take_traffic(self, ranks: int) -> None:
        """See what was carried between the last two samples."""
        sample, before = self._traffic.newest, self._sample
        if sample is None or sample is before:
            return
        self._sample = sample
        if before is None or sample.at <= before.at:
            return
        most = SILENT_BYTES_PER_S * ranks * (sample.at - before.at)
        for kind, counters in sample.counters.items():
            carried = grown(before.counters.get(kind, {}), counters)
            if carried is not None and carried > most:
                self._carried[kind] = sample.at

    def _no_traffic_s(self, now: Seconds) -> Seconds | None:
        """None: these ranks have had no traffic yet that could cease, or nobody can look."""
        if self._sample is None or now - self._sample.at > BLIND_S:
            return None
        last = self._carried.get(Kind.RDMA, self._carried.get(Kind.INTERFACES))
        return None if last is None else max(0.0, now - last)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _ticks_of(process: Process) -> int | None:
    """None if it is gone."""
    found = entry(process.pid)
    return None if found is None or found.process != process else found.ticks
