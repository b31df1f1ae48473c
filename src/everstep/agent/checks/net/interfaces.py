"""The source "net": link, speed, MTU and packet counters of interfaces, every second.

Read are those that the job uses and those with a device behind them; a host may have hundreds of
virtual ones of its containers, which are nobody's fault. It runs in a child: some files of
/sys/class/net wait for a lock that a card whose firmware died holds for a minute.
"""

from __future__ import annotations

import errno
import time
from typing import ClassVar

from everstep.agent.checks.check import Here, Source
from everstep.agent.checks.net import sysfs
from everstep.agent.checks.net.routes import default_routes
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Counts, Result
from everstep.model import Seconds, Value

COUNTED = (
    "rx_packets",
    "tx_packets",
    "rx_errors",
    "tx_errors",
    "rx_dropped",
    "tx_dropped",
    "rx_missed_errors",
)
"""Of statistics/."""
COUNT_EVERY = 5
"""Samples between two looks at packet counters: losses are judged over half a minute."""
RARELY = 30
"""Samples between two looks at what hardly changes: speed (which asks the card's firmware), MTU,
driver, routes."""
NO_INTERFACES = frozenset({"bonding_masters"})
"""What else lies in /sys/class/net."""
HUNG_S: Seconds = 30.0
"""A healthy kernel answers in microseconds, and within seconds while it makes many interfaces."""


class Interface(Value, frozen=True, kw_only=True):
    """One network interface."""

    up: bool | None = None
    """None: cannot be told; `why` says the reason."""
    why: str = ""
    """Of up being no or unknown."""
    was_up: bool = False
    """It was up at some time since this source began."""
    changes: int | None = None
    """Carrier came or went so often."""
    changed_s: Seconds | None = None
    """Since it last did; None: not since this source began."""
    physical: bool = False
    """There is a device behind it."""
    driver: str = ""
    rdma: tuple[str, ...] = ()
    """InfiniBand or RoCE devices of the same card. Their ports' state is then what is judged."""
    speed_mbps: int | None = None
    mtu: int | None = None
    counts: dict[str, int] = {}


class Interfaces(Value, frozen=True, kw_only=True):
    """A sample."""

    interfaces: dict[str, Interface]
    used: tuple[str, ...]
    """Those that the job needs, also if they are gone: named ones, or those that have or had a
    default route (an interface that is set down loses its routes) and were up at some time."""


class InterfacesSource(Source[Interfaces]):
    """Reads /sys/class/net."""

    name = "net"
    kind = Interfaces
    every_s = 1.0
    blocks: ClassVar[bool] = True

    def __init__(self) -> None:
        self._rounds = 0
        self._known: dict[str, _Known] = {}
        self._routed: dict[str, bool] = {}

    def absent(self, here: Here) -> str:
        there = sysfs.is_there(sysfs.place(here, "/sys/class/net"))
        return "" if there else "/sys/class/net does not exist"

    def sample(self, here: Here) -> Interfaces:
        directory = sysfs.place(here, "/sys/class/net")
        present = [name for name in sysfs.listed(directory) if name not in NO_INTERFACES]
        rarely = self._rounds % RARELY == 0
        count = self._rounds % COUNT_EVERY == 0
        self._rounds += 1
        if rarely:
            for route in default_routes(here):
                self._routed.setdefault(route.interface, False)
        self._meet(directory, present)
        wanted = here.interfaces or self._routed
        looked = {
            name: known.look(rarely=rarely, count=count)
            for name, known in self._known.items()
            if known.physical or name in wanted
        }
        for name in self._routed:
            self._routed[name] |= name in looked and looked[name].up is True
        used = here.interfaces or tuple(name for name, up in self._routed.items() if up)
        return Interfaces(interfaces=looked, used=used)

    def unanswered(self, for_s: Seconds, times: int) -> Result | None:
        if for_s < HUNG_S:
            return None
        return Result(
            check="net.answers",
            verdict=Verdict.SUSPECT,
            category=Category.INFINIBAND_ERROR,
            counts=Counts.TWICE,
            why=f"/sys/class/net has not answered for {for_s:.0f} s ({times} times)",
            do="Look in the kernel log for the network driver that hangs, and reboot the machine.",
        )

    def _meet(self, directory: str, present: list[str]) -> None:
        """Learn of new interfaces, forget those that are gone."""
        for name in present:
            if name not in self._known:
                self._known[name] = _Known(directory, name)
        if len(self._known) > len(present):
            here = set(present)
            self._known = {name: known for name, known in self._known.items() if name in here}


class _Known:
    """An interface that has been met: its paths, and what is looked at rarely."""

    def __init__(self, directory: str, name: str) -> None:
        self._directory = directory
        self._name = name
        at = f"{directory}/{name}"
        self._operstate = f"{at}/operstate"
        self._carrier = f"{at}/carrier"
        self._changes = f"{at}/carrier_changes"
        self._counted = tuple((each, f"{at}/statistics/{each}") for each in COUNTED)
        self._last = Interface()
        self._changed: Seconds | None = None
        self.physical = bool(sysfs.link_name(f"{at}/device"))

    def look(self, *, rarely: bool, count: bool) -> Interface:
        last = self._last
        fresh = last.up is None
        operstate = sysfs.text(self._operstate)
        changes = sysfs.number(self._changes)
        steady = changes is not None and changes == last.changes
        now = time.monotonic()
        if not steady and last.changes is not None:
            self._changed = now
        up, why = (True, "") if steady and operstate == "up" else self._link(operstate)
        if rarely or fresh:
            self._learn()
        asked = rarely or fresh or not steady
        self._last = Interface(
            up=up,
            why=why,
            was_up=last.was_up or up is True,
            changes=changes,
            changed_s=None if self._changed is None else now - self._changed,
            physical=self.physical,
            driver=self._driver,
            rdma=self._rdma,
            speed_mbps=self._speed() if asked and up else last.speed_mbps,
            mtu=self._mtu,
            counts=self._count() if count or asked else last.counts,
        )
        return self._last

    def _link(self, operstate: str) -> tuple[bool | None, str]:
        """The carrier decides: operstate may lag a second behind, or be unknown for ever."""
        try:
            carrier = sysfs.read(self._carrier)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False, "it is set down"
            return None, f"its carrier cannot be read: {error.strerror}"
        if carrier not in (b"0", b"1"):
            return None, f"its carrier reads {carrier[:20]!r}"
        if carrier == b"0":
            return False, f"it has no carrier (operstate {operstate or 'unknown'})"
        if operstate == "notpresent":
            return False, "its device does not answer (operstate notpresent)"
        return True, ""

    def _learn(self) -> None:
        at = f"{self._directory}/{self._name}"
        self._driver = sysfs.link_name(f"{at}/device/driver")
        self._rdma = tuple(_rdma(self._directory, self._name))
        self._mtu = sysfs.number(f"{at}/mtu")

    def _speed(self) -> int | None:
        speed = sysfs.number(f"{self._directory}/{self._name}/speed")
        return speed if speed is not None and speed > 0 else None

    def _count(self) -> dict[str, int]:
        read = ((name, sysfs.number(path)) for name, path in self._counted)
        return {name: value for name, value in read if value is not None}


def _rdma(directory: str, name: str, depth: int = 3) -> list[str]:
    """Of its own device, or of those below a bond or VLAN, which have none."""
    at = f"{directory}/{name}"
    if sysfs.link_name(f"{at}/device"):
        return sysfs.names(f"{at}/device/infiniband")
    below = [each.removeprefix("lower_") for each in sysfs.names(at) if each.startswith("lower_")]
    if not depth:
        return []
    return [device for each in below for device in _rdma(directory, each, depth - 1)]
