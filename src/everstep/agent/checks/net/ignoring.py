"""Which RDMA devices are nobody's business. Limits of all judges of ports and devices."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from everstep.agent.checks.check import Here, Limits

ACCELERATED = ("mlx5_an*",)
"""Azure names the virtual functions of accelerated networking so: it takes them away and gives them
back while it serves the host, and traffic goes on without them."""


class PortLimits(Limits, frozen=True, kw_only=True):
    """Base of the limits of checks that look at RDMA ports."""

    ignore: tuple[str, ...] = ACCELERATED
    """Patterns of devices that are not looked at. The default are those that Azure takes away and
    gives back while it serves the host."""


def ignored(port: str, here: Here, limits: PortLimits) -> bool:
    """Whether the device of this port, or this device, is not to be looked at.

    That of another port than the job uses may be a DPU's, or serve storage or management.
    """
    device = port.partition("/")[0]
    if here.hcas and device not in here.hcas:
        return True
    return any(fnmatchcase(device, pattern) for pattern in limits.ignore)


def judged_as_ports(devices: Iterable[str], here: Here) -> list[str]:
    """Those RDMA devices of an interface whose ports are judged in its place."""
    return [each for each in devices if not ignored(each, here, PortLimits())]
