"""The source "infiniband": state of InfiniBand, RoCE and EFA ports, every second.

It runs in a child: many of these files ask the card's firmware, and a dead one answers after a
minute or never.
"""

from __future__ import annotations

from typing import ClassVar

from everstep.agent.checks.check import Here, Source
from everstep.agent.checks.net import sysfs
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Counts, Result
from everstep.model import Seconds, Value

CLASS = "/sys/class/infiniband"
ACTIVE = "ACTIVE"
STATES = frozenset({"NOP", "DOWN", "INIT", "ARMED", ACTIVE, "ACTIVE_DEFER"})
RARELY = 30
"""Samples between two looks at the rate, which asks the firmware and hardly changes."""
HUNG_S: Seconds = 20.0
"""A healthy card answers in a millisecond; mlx5 gives a command up after 60 s."""


class Port(Value, frozen=True, kw_only=True):
    """One port of a device."""

    state: str = ""
    """"ACTIVE", "DOWN", "INIT"...; empty: cannot be told, `why` says the reason."""
    why: str = ""
    physical: str = ""
    """ "LinkUp", "Polling", "Disabled"..."""
    downed: int | None = None
    """Times that the link went down. Older cards stop counting at 255."""
    rate_gbps: float | None = None
    link_layer: str = ""
    """ "InfiniBand", "Ethernet" (RoCE), "Unspecified" (EFA)."""
    board: str = ""
    """What model the card is: ports of equal cards should be equal."""
    was_active: bool = False
    """It was ACTIVE at some time since this source began."""


class Ports(Value, frozen=True, kw_only=True):
    """A sample."""

    ports: dict[str, Port]
    """By device/port, as in mlx5_0/1."""
    devices: tuple[str, ...]
    """Those there are now."""
    met: dict[str, bool]
    """All devices that were ever here, and whether a port of them was ever ACTIVE."""
    lent: tuple[str, ...] = ()
    """Virtual functions beside the devices that they are parts of: a host's, to be given to
    containers, which take them away without a fault."""


class PortsSource(Source[Ports]):
    """Reads /sys/class/infiniband."""

    name = "infiniband"
    kind = Ports
    every_s = 1.0
    blocks: ClassVar[bool] = True

    def __init__(self) -> None:
        self._rounds = 0
        self._known: dict[str, dict[str, _Known]] = {}
        self._met: dict[str, bool] = {}
        self._virtual: set[str] = set()

    def absent(self, here: Here) -> str:
        return class_absent(here)

    def sample(self, here: Here) -> Ports:
        directory = sysfs.place(here, CLASS)
        devices = self._listed(directory)
        rarely = self._rounds % RARELY == 0
        self._rounds += 1
        self._meet(directory, devices, again=rarely)
        ports = {}
        for device, known in self._known.items():
            for name, port in known.items():
                ports[name] = port.look(rarely=rarely)
                self._met[device] = self._met.get(device, False) or ports[name].was_active
        whole = self._met.keys() - self._virtual
        lent = tuple(sorted(self._virtual)) if whole else ()
        return Ports(ports=ports, devices=tuple(devices), met=dict(self._met), lent=lent)

    def unanswered(self, for_s: Seconds, times: int) -> Result | None:
        if for_s < HUNG_S:
            return None
        return Result(
            check="ib.answers",
            verdict=Verdict.SUSPECT,
            category=Category.INFINIBAND_ERROR,
            counts=Counts.TWICE,
            why=f"{CLASS} has not answered for {for_s:.0f} s ({times} times)",
            do="Look in the kernel log for a card whose firmware died, and reboot the machine.",
        )

    def _listed(self, directory: str) -> list[str]:
        try:
            return sysfs.listed(directory)
        except FileNotFoundError:
            if self._met:
                return []  # the driver was unloaded: all devices are gone
            raise

    def _meet(self, directory: str, devices: list[str], *, again: bool) -> None:
        """Learn of new devices, forget those that are gone."""
        for device in devices:
            if device not in self._met:
                self._met[device] = False
                if sysfs.is_there(f"{directory}/{device}/device/physfn"):
                    self._virtual.add(device)
            if again or device not in self._known:
                known = self._known.setdefault(device, {})
                for number in sysfs.names(f"{directory}/{device}/ports"):
                    known.setdefault(f"{device}/{number}", _Known(directory, device, number))
        if len(self._known) > len(devices):
            self._known = {device: self._known[device] for device in devices}


class _Known:
    """A port that has been met: its paths, and what is looked at rarely."""

    def __init__(self, directory: str, device: str, number: str) -> None:
        at = f"{directory}/{device}/ports/{number}"
        self._state = f"{at}/state"
        self._physical = f"{at}/phys_state"
        self._downed = f"{at}/counters/link_downed"
        self._rate = f"{at}/rate"
        self._last = Port()
        self._link_layer = sysfs.text(f"{at}/link_layer")
        of_device = (
            sysfs.text(f"{directory}/{device}/{each}") for each in ("hca_type", "board_id")
        )
        self._board = " ".join(each for each in of_device if each)

    def look(self, *, rarely: bool) -> Port:
        state, why = self._look_state()
        last = self._last
        came_up = state == ACTIVE and last.state != ACTIVE
        self._last = Port(
            state=state,
            why=why,
            physical=sysfs.text(self._physical).partition(": ")[2],
            downed=sysfs.number(self._downed),
            rate_gbps=self._look_rate() if rarely or came_up else last.rate_gbps,
            link_layer=self._link_layer,
            board=self._board,
            was_active=last.was_active or state == ACTIVE,
        )
        return self._last

    def _look_state(self) -> tuple[str, str]:
        """The file holds "4: ACTIVE"."""
        try:
            raw = sysfs.read(self._state).decode(errors="replace")
        except OSError as error:
            return "", f"its state cannot be read: {error.strerror}"
        state = raw.partition(": ")[2]
        return (state, "") if state in STATES else ("", f"its state reads {raw[:20]!r}")

    def _look_rate(self) -> float | None:
        """The file holds "400 Gb/sec (4X NDR)"."""
        try:
            return float(sysfs.text(self._rate).partition(" ")[0])
        except ValueError:
            return None


def class_absent(here: Here) -> str:
    """Why there are no RDMA devices; empty if there may be some. For all sources of them."""
    there = sysfs.is_there(sysfs.place(here, CLASS))
    return "" if there else "this machine has no InfiniBand, RoCE or EFA device"
