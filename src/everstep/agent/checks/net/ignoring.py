"""Which RDMA devices are nobody's business. Limits of all judges of ports and devices."""

from __future__ import annotations

from fnmatch import fnmatchcase

from everstep.agent.checks.check import Limits


class PortLimits(Limits, frozen=True, kw_only=True):
    """Base of the limits of checks that look at RDMA ports."""

    ignore: tuple[str, ...] = ("mlx5_an*",)
    """Patterns of devices that are not looked at. Azure names the virtual functions of accelerated
    networking so: it takes them away and gives them back while it serves the host, and traffic
    goes on without them."""


def ignored(port: str, limits: PortLimits) -> bool:
    """Whether the device of this port, or this device, is not to be looked at."""
    device = port.partition("/")[0]
    return any(fnmatchcase(device, pattern) for pattern in limits.ignore)
