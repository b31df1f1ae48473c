"""The source "net.tcp": segments sent again, and the table of tracked connections, every 10 s."""

from __future__ import annotations

import contextlib
from typing import ClassVar

from everstep.agent.checks.check import Here, NotReadable, Source
from everstep.agent.checks.net import sysfs
from everstep.model import Value

_WANTED = {
    "Tcp": ("OutSegs", "RetransSegs", "AttemptFails"),
    "TcpExt": ("TCPTimeouts", "TCPLostRetransmit", "ListenDrops"),
}


class Tcp(Value, frozen=True, kw_only=True):
    """A sample."""

    counts: dict[str, int]
    """Counters by their names in /proc/net/snmp and /proc/net/netstat."""
    tracked: int | None = None
    """Connections in the table of netfilter; None: there is no such table."""
    tracked_most: int | None = None


class TcpSource(Source[Tcp]):
    """Reads /proc/net and nf_conntrack_count."""

    name = "net.tcp"
    kind = Tcp
    every_s = 10.0
    blocks: ClassVar[bool] = False

    def absent(self, here: Here) -> str:
        there = sysfs.is_there(sysfs.place(here, "/proc/net/snmp"))
        return "" if there else "/proc/net/snmp does not exist"

    def sample(self, here: Here) -> Tcp:
        counts = parse(sysfs.read_long(sysfs.place(here, "/proc/net/snmp")))
        if "OutSegs" not in counts:
            raise NotReadable("/proc/net/snmp holds no line of TCP counters that can be read")
        with contextlib.suppress(OSError):  # these only say more about what snmp shows
            counts |= parse(sysfs.read_long(sysfs.place(here, "/proc/net/netstat")))
        table = sysfs.place(here, "/proc/sys/net/netfilter/nf_conntrack_")
        return Tcp(
            counts=counts,
            tracked=sysfs.number(f"{table}count"),
            tracked_most=sysfs.number(f"{table}max"),
        )


def parse(text: str) -> dict[str, int]:
    """Counters that we want, from pairs of lines: names, then values. Torn lines are left out."""
    found: dict[str, int] = {}
    lines = text.splitlines()
    for heads, numbers in zip(lines[::2], lines[1::2], strict=False):
        topic, _, names = heads.partition(":")
        if topic not in _WANTED or not numbers.startswith(f"{topic}:"):
            continue
        values = dict(zip(names.split(), numbers.partition(":")[2].split(), strict=False))
        for name in _WANTED[topic]:
            if values.get(name, "").isdecimal():
                found[name] = int(values[name])
    return found
