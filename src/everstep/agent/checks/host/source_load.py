"""Source "load": how busy processors, memory and disks are, and how near the machine's limits.

Apart from "proc" and less often, because on a machine of 200 processors the kernel needs a
millisecond to add up /proc/stat. Judged by load.py, pressure.py and handles.py.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from everstep.agent.checks.check import Here, NotReadable, Source
from everstep.agent.checks.host.reading import integer, missing, number, read, readable, real
from everstep.model import Seconds, Value

_STEAL = 7
"""Position in the first line of /proc/stat: user nice system idle iowait irq softirq steal."""
_USED_UP = 8
"""Times from here on are counted in the former ones as well."""


class Pressure(Value, frozen=True, kw_only=True):
    """Share of the last minute in which tasks waited for one resource (/proc/pressure)."""

    some: float
    """At least one did."""
    full: float
    """All did that had something to do. 0 for processors of the whole machine."""


class LoadSample(Value, frozen=True, kw_only=True):
    """Of one moment."""

    load: float
    """Tasks that ran or waited for a disk, on average over five minutes."""
    cpus: int
    """Processors that are on."""
    ticks: int
    """Time of all processors together since the boot."""
    steal_ticks: int
    """Of it, what the hypervisor gave to somebody else."""
    pressure: dict[str, Pressure] = {}
    """cpu, memory, io -> how it waits; those that this kernel tells."""
    files: int | None = None
    """Open files of the machine; None: unreadable."""
    files_max: int = 0
    tasks: int = 0
    """Processes and threads of the machine."""
    tasks_max: int | None = None


class Load(Source[LoadSample]):
    """Reads /proc/loadavg, /proc/stat, /proc/pressure/ and the limits in /proc/sys."""

    name: ClassVar[str] = "load"
    kind: ClassVar[type[Value]] = LoadSample
    every_s: ClassVar[Seconds] = 10.0

    def absent(self, here: Here) -> str:
        return "there is no /proc/loadavg" if missing(here, "/proc/loadavg") else ""

    def sample(self, here: Here) -> LoadSample:
        words = read(here, "/proc/loadavg").split()
        if len(words) < 4:
            raise NotReadable("/proc/loadavg has too few words")
        ticks, cpus = _ticks(read(here, "/proc/stat"))
        files = readable(lambda: _pair(read(here, "/proc/sys/fs/file-nr")))
        return LoadSample(
            load=real(words[1]),
            cpus=cpus,
            ticks=sum(ticks[:_USED_UP]),
            steal_ticks=ticks[_STEAL],
            pressure=_pressures(here),
            files=files[0] if files else None,
            files_max=files[1] if files else 0,
            tasks=integer(words[3].partition("/")[2]),
            tasks_max=readable(lambda: _tasks_max(here)),
        )


def _ticks(stat: str) -> tuple[list[int], int]:
    """Times of all processors together, and how many they are."""
    lines = stat.splitlines()
    ticks = [integer(word) for word in lines[0].split()[1:]] if lines else []
    cpus = sum(line.startswith("cpu") for line in lines) - 1
    if len(ticks) < _USED_UP or cpus < 1:
        raise NotReadable("/proc/stat does not begin with the times of the processors")
    return ticks, cpus


def _pair(file_nr: str) -> tuple[int, int]:
    used, _, most = file_nr.split()
    return integer(used), integer(most)


def _tasks_max(here: Here) -> int:
    return min(number(here, f"/proc/sys/kernel/{name}") for name in ("pid_max", "threads-max"))


def _pressures(here: Here) -> dict[str, Pressure]:
    looks = {name: readable(partial(_pressure, here, name)) for name in ("cpu", "memory", "io")}
    return {name: pressure for name, pressure in looks.items() if pressure is not None}


def _pressure(here: Here, name: str) -> Pressure:
    """Lines like "some avg10=0.00 avg60=1.25 avg300=0.00 total=12", in percent."""
    shares = {"some": 0.0, "full": 0.0}
    for line in read(here, f"/proc/pressure/{name}").splitlines():
        words = dict(word.partition("=")[::2] for word in line.split())
        kind = line.partition(" ")[0]
        if kind in shares:
            shares[kind] = real(words.get("avg60", "")) / 100
    return Pressure(**shares)
