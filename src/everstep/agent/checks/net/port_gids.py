"""The source "infiniband.gids": the addresses (GIDs) of RDMA ports, every minute.

A job names the index of the GID that it uses (NCCL_IB_GID_INDEX). Where that entry is empty or has
become another type, connections fail at the first collective.
"""

from __future__ import annotations

from typing import ClassVar

from everstep.agent.checks.check import Here, Source
from everstep.agent.checks.net import sysfs
from everstep.agent.checks.net.ports import CLASS, class_absent
from everstep.model import Value

INDICES = 16
"""Entries looked at; a table has up to 256, and jobs use those of the first addresses."""
_EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"


class Gids(Value, frozen=True, kw_only=True):
    """A sample."""

    ports: dict[str, dict[int, str]]
    """Port -> index -> type of the entry, as "RoCE v2"; only entries that hold an address."""
    unread: dict[str, str] = {}
    """Port -> why its table cannot be read."""


class GidsSource(Source[Gids]):
    """Reads gids and gid_attrs/types of all ports."""

    name = "infiniband.gids"
    kind = Gids
    every_s = 60.0
    blocks: ClassVar[bool] = True

    def absent(self, here: Here) -> str:
        return class_absent(here)

    def sample(self, here: Here) -> Gids:
        directory = sysfs.place(here, CLASS)
        ports: dict[str, dict[int, str]] = {}
        unread: dict[str, str] = {}
        for device in sysfs.listed(directory):
            for number in sysfs.names(f"{directory}/{device}/ports"):
                at = f"{directory}/{device}/ports/{number}"
                try:
                    ports[f"{device}/{number}"] = _table(at)
                except OSError as error:
                    unread[f"{device}/{number}"] = error.strerror or "it cannot be read"
        return Gids(ports=ports, unread=unread)


def _table(at: str) -> dict[int, str]:
    found = {}
    there = sorted(int(name) for name in sysfs.listed(f"{at}/gids") if name.isdecimal())
    for index in there[:INDICES]:
        if sysfs.read(f"{at}/gids/{index}").decode(errors="replace") != _EMPTY:
            found[index] = sysfs.text(f"{at}/gid_attrs/types/{index}")
    return found
