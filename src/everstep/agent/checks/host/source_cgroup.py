"""Source "cgroup": what the job's group was given of this machine, and what it ran into.

In the agent's loop: a dozen small files. Judged by oom.py and cgroup.py.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from everstep.agent.checks.check import Here, Source
from everstep.agent.checks.host.cgroups import Groups
from everstep.agent.checks.host.reading import limit, missing, number, read, share, table, there
from everstep.model import Seconds, Value

_V1_NO_LIMIT = 1 << 62
"""v1 writes the largest number of pages there is, a little less than 2**63 bytes."""
_LOOK_CLOSER = 0.8
"""Files that the kernel caches count as used, and can be given up. How many they are costs as much
to find out as all the rest: only if the sum is near the limit."""


class GroupMemory(Value, frozen=True, kw_only=True):
    """Memory of one group, in bytes."""

    group: str
    """Its directory. Counters of another group are not comparable."""
    oom_kills: int | None
    """Processes that were ended for want of memory; None: this kernel does not count them."""
    limit_hits: int
    """How often it, or a group around it, could not get memory because of its limit."""
    used: int
    """Without cached files that can be given up, if that could matter."""
    limit: int | None
    """The smallest of its own and of the groups around it. None: all of the machine."""


class GroupCpu(Value, frozen=True, kw_only=True):
    """Time of one group."""

    periods: int
    """Slices of time (100 ms) in which it used processors."""
    throttled: int
    """Of these, where it had used up its share and had to stop."""


class GroupTasks(Value, frozen=True, kw_only=True):
    """Processes and threads of one group."""

    used: int
    limit: int | None


class CgroupSample(Value, frozen=True, kw_only=True):
    """Of one moment. None: the group has no such limit or counter."""

    memory: GroupMemory | None = None
    cpu: GroupCpu | None = None
    tasks: GroupTasks | None = None


class Cgroup(Source[CgroupSample]):
    """Reads the groups that the agent itself belongs to."""

    name: ClassVar[str] = "cgroup"
    kind: ClassVar[type[Value]] = CgroupSample
    every_s: ClassVar[Seconds] = 5.0

    def __init__(self) -> None:
        self._groups = Groups()

    def absent(self, here: Here) -> str:
        return "this kernel has no cgroups" if missing(here, "/proc/self/cgroup") else ""

    def sample(self, here: Here) -> CgroupSample:
        self._groups.look(here)
        return CgroupSample(
            memory=_memory(here, self._groups.line("memory")),
            cpu=_cpu(here, self._groups.line("cpu")),
            tasks=_tasks(here, self._groups.line("pids")),
        )


def _memory(here: Here, line: list[str]) -> GroupMemory | None:
    if not line:
        return None
    v1 = there(partial(_table, here, f"{line[0]}/memory.oom_control"))
    return _memory_v2(here, line) if v1 is None else _memory_v1(here, line, v1.get("oom_kill"))


def _memory_v1(here: Here, line: list[str], oom_kills: int | None) -> GroupMemory:
    limits = [there(partial(number, here, f"{at}/memory.limit_in_bytes")) for at in line]
    hits = [there(partial(number, here, f"{at}/memory.failcnt")) for at in line]
    used = number(here, f"{line[0]}/memory.usage_in_bytes")
    smallest = min((each for each in limits if each is not None), default=_V1_NO_LIMIT)
    most = None if smallest >= _V1_NO_LIMIT else smallest
    return GroupMemory(
        group=line[0],
        oom_kills=oom_kills,
        limit_hits=sum(each or 0 for each in hits),
        used=used - _given_up(here, line[0], "total_inactive_file", used, most),
        limit=most,
    )


def _memory_v2(here: Here, line: list[str]) -> GroupMemory | None:
    """None for the root of all groups, which has no limit and counts nothing."""
    used = there(partial(number, here, f"{line[0]}/memory.current"))
    if used is None:
        return None
    # Its own events include those of the groups in it, and so do those of the groups around it.
    events = [there(partial(_table, here, f"{at}/memory.events")) or {} for at in line]
    limits = [there(partial(limit, here, f"{at}/memory.max")) for at in line]
    most = min((each for each in limits if each is not None), default=None)
    return GroupMemory(
        group=line[0],
        oom_kills=events[0].get("oom_kill"),
        limit_hits=sum(each.get("oom", 0) for each in events),
        used=used - _given_up(here, line[0], "inactive_file", used, most),
        limit=most,
    )


def _given_up(here: Here, group: str, name: str, used: int, most: int | None) -> int:
    """Bytes of cached files that the kernel would give up first."""
    if most is None or share(used, most) < _LOOK_CLOSER:
        return 0
    stat = there(partial(_table, here, f"{group}/memory.stat")) or {}
    return min(used, stat.get(name, 0))


def _cpu(here: Here, line: list[str]) -> GroupCpu | None:
    stat = there(partial(_table, here, f"{line[0]}/cpu.stat")) if line else None
    if not stat or "nr_periods" not in stat:
        return None
    return GroupCpu(periods=stat["nr_periods"], throttled=stat.get("nr_throttled", 0))


def _tasks(here: Here, line: list[str]) -> GroupTasks | None:
    """None for the root of all groups."""
    used = there(partial(number, here, f"{line[0]}/pids.current")) if line else None
    if used is None:
        return None
    return GroupTasks(used=used, limit=there(partial(limit, here, f"{line[0]}/pids.max")))


def _table(here: Here, absolute: str) -> dict[str, int]:
    return table(read(here, absolute))
