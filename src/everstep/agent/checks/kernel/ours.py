"""Finds out what of this machine the job uses, so that a line of the kernel log can be attributed.

Reads /proc and /sys alone, never a path of the job: those may lie on storage that hangs. Used by
source.py, which asks seldom and keeps what was once found: a GPU that fell off the bus is in no
list any more, and it was the job's all the same.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from everstep.agent.checks.check import Here
from everstep.agent.checks.kernel.lines import Ours
from everstep.agent.checks.mount_table import Mount, by_point, mount_of, parse
from everstep.agent.checks.net.ignoring import PortLimits, ignored, judged_as_ports
from everstep.agent.checks.net.routes import default_routes

INIT_PID_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO: elsewhere our pids are not those of the kernel log."""
MOST_PIDS = 2_048
MOST_COMMANDS = 64
"""Processes whose cgroups are looked at: ranks, of which no machine has more."""
ANCESTORS = 8

_BDF = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
_OF_A_POD = re.compile(r"/pods/([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/")
_OF_A_CONTAINER = re.compile(r"/containers/([0-9a-f]{64})/")
_NVIDIA_GPUS = "/proc/driver/nvidia/gpus"
"""In a container only those that it was given."""
_NVIDIA, _AMD = "0x10de", "0x1002"
_ACCELERATORS = ("0x12", "0x0207", "0x0380")
"""Classes of processing accelerators, InfiniBand and displays that show nothing."""


class Inventory:
    """What was found so far. One of an agent."""

    def __init__(self) -> None:
        self._ours = Ours()
        self._pids: dict[int, None] = {}

    def look(self, here: Here) -> Ours:
        """Look again; what is gone stays the job's."""
        pci, disks = set(self._ours.pci), set(self._ours.disks)
        mounts = list(_mounts(here))
        for device in _devices(here, mounts):
            parts = device.parts
            pci.update(part for part in parts if _BDF.match(part))
            disks.update(parts[parts.index("devices") + 1 :] if "devices" in parts else ())
        interfaces = sorted({*self._ours.interfaces, *_hardware(here)})
        servers = {name for mount in mounts for name in _servers(mount)}
        self._ours = Ours(
            pci=tuple(sorted(pci)),
            disks=tuple(sorted(disks)),
            interfaces=tuple(interfaces),
            servers=tuple(sorted({*self._ours.servers, *servers})),
            cgroups=self._ours.cgroups,
            pids=self._ours.pids,
            uuids={**self._ours.uuids, **_uuids(here)},
        )
        return self.look_at_processes(here, ())

    def look_at_processes(self, here: Here, asked: Iterable[int]) -> Ours:
        """Ranks, their cgroups, and those of `asked` that descend from ranks."""
        if _pids_are_foreign(here):
            cgroups = tuple(sorted({*self._ours.cgroups, *_container_marks(here)}))
        else:
            self._add_pids(here.pids)
            known = set(self._pids)
            self._add_pids(pid for pid in asked if _descends(here, pid, known))
            found = {each for pid in here.pids[:MOST_COMMANDS] for each in _cgroups(here, pid)}
            cgroups = tuple(sorted({*self._ours.cgroups, *found}))
        self._ours = _with(self._ours, cgroups[-MOST_COMMANDS:], tuple(self._pids))
        return self._ours

    def _add_pids(self, pids: Iterable[int]) -> None:
        for pid in pids:
            self._pids.pop(pid, None)
            self._pids[pid] = None
        while len(self._pids) > MOST_PIDS:
            self._pids.pop(next(iter(self._pids)))


def _with(ours: Ours, cgroups: tuple[str, ...], pids: tuple[int, ...]) -> Ours:
    return Ours(
        pci=ours.pci,
        disks=ours.disks,
        interfaces=ours.interfaces,
        servers=ours.servers,
        cgroups=cgroups,
        pids=pids,
        uuids=ours.uuids,
    )


# --- devices -------------------------------------------------------------------------------------


def _devices(here: Here, mounts: Iterable[Mount]) -> Iterator[Path]:
    """Places below /sys/devices of all that the job uses; the path says what lies above it."""
    gpus = here.gpus or tuple(each.name for each in _listing(here.path(_NVIDIA_GPUS)))
    for device in _listing(here.path("/sys/bus/pci/devices")):
        if _trains(device) and (not gpus or not _is_nvidia_gpu(device) or device.name in gpus):
            yield _real(device)
    for device in _listing(here.path("/sys/class/infiniband")):
        if not ignored(device.name, here, PortLimits()):
            yield _real(device / "device")
    for interface in _hardware(here):
        device = here.path(f"/sys/class/net/{interface}/device")
        rdma = [each.name for each in _listing(device / "infiniband")]
        if not rdma or judged_as_ports(rdma, here) or interface in here.interfaces:
            yield _real(device)
    for mount in mounts:
        yield from _disks(here.path(f"/sys/dev/block/{mount.number}"))


def _is_nvidia_gpu(device: Path) -> bool:
    return _read(device / "vendor") == _NVIDIA and _read(device / "class").startswith("0x03")


def _trains(device: Path) -> bool:
    """Whether a PCI device is a GPU or another one that training needs."""
    kind, vendor = _read(device / "class"), _read(device / "vendor")
    if kind.startswith(_ACCELERATORS):
        return True
    if vendor == _NVIDIA:
        return kind.startswith(("0x03", "0x0680"))
    return vendor == _AMD and kind.startswith("0x03")


def _disks(block: Path, depth: int = ANCESTORS) -> Iterator[Path]:
    """A disk, and those that it is made of: of arrays, volumes and encryption."""
    if not block.exists() or depth == 0:
        return
    found = _real(block)
    yield found
    for slave in _listing(found / "slaves"):
        yield from _disks(slave, depth - 1)


def _hardware(here: Here) -> Iterator[str]:
    """Interfaces with a device of their own, that the job's are or are made of."""
    wanted = list(here.interfaces or (route.interface for route in default_routes(here)))
    seen: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        directory = here.path(f"/sys/class/net/{name}")
        if (directory / "device").exists():
            yield name
        names = (each.name for each in _listing(directory))
        wanted += [each.removeprefix("lower_") for each in names if each.startswith("lower_")]


def _uuids(here: Here) -> dict[str, str]:
    """UUID -> address of each NVIDIA GPU."""
    found = {}
    for gpu in _listing(here.path(_NVIDIA_GPUS)):
        for line in _read(gpu / "information").splitlines():
            if line.startswith("GPU UUID:"):
                found[line.partition(":")[2].strip()] = gpu.name
    return found


# --- mounts --------------------------------------------------------------------------------------


def _servers(mount: Mount) -> tuple[str, ...]:
    """Of a network file system: what the kernel log calls it."""
    if mount.type in {"nfs", "nfs4"}:
        return (mount.source.rpartition(":/")[0].strip("[]"), "nfs4")
    if mount.type == "lustre":
        return (mount.source.rpartition(":/")[2].partition("/")[0],)
    return ()


def _mounts(here: Here) -> Iterator[Mount]:
    """Of / and of each of the job's paths: what it lies on."""
    mounts = by_point(parse(_read(here.path("/proc/self/mountinfo"))))
    found = (mount_of(path, mounts) for path in ("/", *here.paths))
    yield from dict.fromkeys(mount for mount in found if mount is not None)


def fuse_connections(here: Here) -> dict[str, int]:
    """Mount point -> number of the kernel's connection, of FUSE file systems of the job."""
    return {
        mount.point: int(mount.number.partition(":")[2])
        for mount in _mounts(here)
        if mount.type.partition(".")[0] in {"fuse", "fuseblk"}
    }


# --- processes -----------------------------------------------------------------------------------


def _pids_are_foreign(here: Here) -> bool:
    try:
        return str(here.path("/proc/self/ns/pid").readlink()) != INIT_PID_NAMESPACE
    except OSError:
        return False


def _cgroups(here: Here, pid: int) -> Iterator[str]:
    """Of a process: those that limit memory or processes."""
    for line in _read(here.path(f"/proc/{pid}/cgroup")).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        limits = not controllers or {"memory", "pids"} & set(controllers.split(","))
        if limits and path not in {"", "/"}:
            yield path


def _container_marks(here: Here) -> Iterator[str]:
    """Nothing is known of other names for our cgroup than what the runtime mounted for us."""
    text = _read(here.path("/proc/self/mountinfo"))
    for found in (*_OF_A_POD.finditer(text), *_OF_A_CONTAINER.finditer(text)):
        yield f"*{found[1]}"


def _descends(here: Here, pid: int, known: set[int]) -> bool:
    """Whether a process of the kernel log is a child of a rank; it may be gone already."""
    for _ in range(ANCESTORS):
        if pid in known:
            return True
        fields = _read(here.path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
        if len(fields) < 2 or not fields[1].isdecimal() or int(fields[1]) <= 1:
            return False
        pid = int(fields[1])
    return False


# --- reading without failing ---------------------------------------------------------------------


def _read(path: Path) -> str:
    """What a file says; empty if it is not there or says nothing."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _listing(path: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(path.iterdir())
    return []


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))
