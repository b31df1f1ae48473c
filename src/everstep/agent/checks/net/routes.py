"""Default routes of the machine, from /proc/net/route and /proc/net/ipv6_route.

An interface with a default route counts as used by the job where nobody names one, and its gateway
is the first thing outside the machine that must answer. Used by the sources "net" and "net.reach".
"""

from __future__ import annotations

import socket
import sys

from everstep.agent.checks.check import Here
from everstep.agent.checks.net import sysfs
from everstep.model import Value

_UP, _GATEWAY, _REJECT = 0x1, 0x2, 0x200


class Route(Value, frozen=True, kw_only=True):
    """One default route."""

    interface: str
    gateway: str = ""
    """Address, with %interface if it is a link-local one; empty: everything is on the link."""


def default_routes(here: Here) -> tuple[Route, ...]:
    """All there are now. A table that cannot be read has none: not every kernel has IPv6."""
    found: list[Route] = []
    for name, parse in (("/proc/net/route", _parse_v4), ("/proc/net/ipv6_route", _parse_v6)):
        try:
            lines = sysfs.read_long(sysfs.place(here, name)).splitlines()
        except OSError:
            continue
        for line in lines:
            try:
                route = parse(line.split())
            except (ValueError, IndexError):
                continue
            if route is not None and route not in found:
                found.append(route)
    return tuple(found)


def _parse_v4(fields: list[str]) -> Route | None:
    interface, destination, gateway, flags, mask = *fields[:4], fields[7]
    if int(destination, 16) or int(mask, 16) or not _usable(flags):
        return None
    address = int(gateway, 16).to_bytes(4, sys.byteorder)
    by = socket.inet_ntop(socket.AF_INET, address) if int(flags, 16) & _GATEWAY else ""
    return Route(interface=interface, gateway=by)


def _parse_v6(fields: list[str]) -> Route | None:
    destination, length, gateway, flags, interface = *fields[:2], fields[4], fields[8], fields[9]
    if int(destination, 16) or int(length, 16) or not _usable(flags):
        return None
    if not int(flags, 16) & _GATEWAY:
        return Route(interface=interface)
    by = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(gateway))
    return Route(interface=interface, gateway=f"{by}%{interface}" if by.startswith("fe8") else by)


def _usable(flags: str) -> bool:
    return bool(int(flags, 16) & _UP) and not int(flags, 16) & _REJECT
