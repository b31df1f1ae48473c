"""Trees of files as the kernel shows them under /sys and /proc, for sources with another root."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from everstep.agent.checks.check import Here

NOBODY = 65534


@contextlib.contextmanager
def as_ordinary_user() -> Iterator[None]:
    """Root reads every file; nobody does not."""
    if os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def write(path: Path, files: Mapping[str, object]) -> Path:
    """Files below a directory; names may hold slashes."""
    for name, content in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    return path


def interface(here: Here, name: str, *, driver: str = "", rdma: str = "", **files: object) -> Path:
    """An interface that is up. With a driver it is a physical one."""
    path = here.path(f"/sys/class/net/{name}")
    names = ("rx_packets", "tx_packets", "rx_errors", "tx_errors", "tx_dropped", "rx_dropped")
    default = {
        "operstate": "up",
        "carrier": 1,
        "carrier_changes": 2,
        "speed": 100000,
        "mtu": 9000,
        **{f"statistics/{each}": 0 for each in names},
    }
    write(path, {**default, **files})
    if driver:
        device = here.path(f"/sys/devices/of_{name}")
        device.mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(f"../../bus/pci/drivers/{driver}")
        (path / "device").symlink_to(device)
        if rdma:
            (device / "infiniband" / rdma).mkdir(parents=True)
    return path


def port(here: Here, device: str, number: int = 1, **files: object) -> Path:
    """A port of an RDMA device that is active. A double underscore stands for a slash."""
    default = {
        "state": "4: ACTIVE",
        "phys_state": "5: LinkUp",
        "rate": "400 Gb/sec (4X NDR)",
        "link_layer": "InfiniBand",
        "counters/link_downed": 0,
    }
    of_device = here.path(f"/sys/class/infiniband/{device}")
    write(of_device, {"hca_type": "MT4129", "board_id": "MT_0000000838"})
    given = {name.replace("__", "/"): content for name, content in files.items()}
    return write(of_device / "ports" / str(number), {**default, **given})


def routes(here: Here, *lines: str) -> None:
    """Of /proc/net/route, as "eth0 010200C0 0003": interface, gateway, flags, and a mask."""
    head = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT"
    rows = []
    for line in lines:
        name, gateway, flags, *mask = line.split()
        of = mask[0] if mask else "00000000"
        rows.append(f"{name}\t00000000\t{gateway}\t{flags}\t0\t0\t0\t{of}\t0\t0\t0")
    write(here.path("/proc/net"), {"route": "\n".join([head, *rows])})
