"""Bytes that this machine's network has carried: of RDMA ports, and of its network interfaces.

For activity.py. Counters are read in a thread, because those of RDMA cards ask the card's firmware,
and a dead one answers after a minute or never.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from threading import Thread
from typing import NamedTuple

from everstep.agent.checks.check import Here
from everstep.agent.checks.net import sysfs
from everstep.agent.checks.net.counters import growth
from everstep.agent.checks.net.ib_traffic import WORD_BYTES
from everstep.agent.checks.net.ports import CLASS as RDMA_PORTS
from everstep.model import Seconds

NET_DEV = "/proc/net/dev"
"""All interfaces of the own network namespace in one read."""
UNITS = {
    "counters/port_xmit_data": WORD_BYTES,
    "counters/port_rcv_data": WORD_BYTES,
    "hw_counters/tx_bytes": 1,
    "hw_counters/rx_bytes": 1,
}
"""Files of an RDMA port that count data, the last two those of EFA -> bytes in one."""
STUCK = 0xFFFFFFFF
"""Where the counters of old cards stop."""
_RECEIVED, _SENT = 0, 8
"""Columns of an interface in /proc/net/dev."""


class Kind(StrEnum):
    """What carries a job's data."""

    RDMA = "rdma"
    INTERFACES = "interfaces"


Counters = Mapping[Kind, Mapping[str, int]]
"""Bytes so far, by the name of the counter."""


class Sample(NamedTuple):
    """Counters and when they were read (time.monotonic)."""

    at: Seconds
    counters: Counters


def counted(here: Here, *, loopback: bool) -> Counters:
    """All counters as they are now. `loopback`: its bytes count as well."""
    found = {Kind.INTERFACES: dict(_interfaces(here)), Kind.RDMA: dict(_ports(here))}
    if not loopback:
        found[Kind.INTERFACES].pop("lo", None)
    return found


def grown(old: Mapping[str, int], new: Mapping[str, int]) -> int | None:
    """Bytes between the two; None if no counter can be compared."""
    each = [growth(old[name], count) for name, count in new.items() if name in old]
    known = [bytes_ for bytes_ in each if bytes_ is not None]
    return sum(known) if known else None


class Traffic:
    """The newest sample. Reading never keeps anybody waiting."""

    def __init__(self, count: Callable[[], Counters]) -> None:
        self._count = count
        self._thread: Thread | None = None
        self.newest: Sample | None = None

    def begin(self) -> None:
        """Take the next sample, unless one is still being taken."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = Thread(target=self._take, name="everstep-traffic", daemon=True)
            self._thread.start()

    def _take(self) -> None:
        counters = self._count()
        self.newest = Sample(time.monotonic(), counters)


def _ports(here: Here) -> Iterator[tuple[str, int]]:
    directory = sysfs.place(here, RDMA_PORTS)
    for device in sysfs.names(directory):
        for port in sysfs.names(f"{directory}/{device}/ports"):
            for name, unit in UNITS.items():
                count = sysfs.number(f"{directory}/{device}/ports/{port}/{name}")
                if count is not None and count != STUCK:
                    yield f"{device}/{port}/{name}", count * unit


def _interfaces(here: Here) -> Iterator[tuple[str, int]]:
    try:
        lines = sysfs.read_long(sysfs.place(here, NET_DEV)).splitlines()
    except OSError:
        return
    for line in lines:
        name, colon, rest = line.partition(":")
        columns = rest.split()
        if colon and len(columns) > _SENT and columns[_RECEIVED].isdecimal():
            yield name.strip(), int(columns[_RECEIVED]) + int(columns[_SENT])
