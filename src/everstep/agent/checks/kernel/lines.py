"""The samples of the kernel log: lines that a rule knows, and what of this machine is the job's.

kmsg.py and feed.py make them, the checks of this package judge them, and the node service sends
lines to agents.
"""

from __future__ import annotations

from everstep.model import Seconds, Value

TEXT_MAX = 320
"""Characters of a line that are kept: whoever needs all of it reads the log."""


class Line(Value, frozen=True, kw_only=True):
    """One line of the kernel log that a rule of kernel.toml knows."""

    seq: int
    """The kernel's own number of it, which only grows within a boot."""
    at: Seconds
    """Since boot, on the kernel log's clock: it drifts against all others by seconds in a month."""
    rule: str
    names: dict[str, str] = {}
    """What the rule's pattern found in it: pci, disk, pid..."""
    text: str = ""


class Ours(Value, frozen=True, kw_only=True):
    """What of this machine the job uses: a line that names nothing of it accuses nobody."""

    pci: tuple[str, ...] = ()
    """Addresses of its GPUs, RDMA devices, NICs and disk controllers, and of the ports above."""
    disks: tuple[str, ...] = ()
    """Names of its disks, their partitions, parts and controllers: "nvme0n1p2", "nvme0", "ata1"."""
    interfaces: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()
    """Servers of its network mounts: hosts of NFS, names of Lustre file systems."""
    cgroups: tuple[str, ...] = ()
    """Of its ranks; never the root."""
    pids: tuple[int, ...] = ()
    """Of its ranks and their children, also of those that ended."""
    uuids: dict[str, str] = {}
    """Of its NVIDIA GPUs -> address, as their driver says."""


class KernelLog(Value, frozen=True, kw_only=True):
    """What is known of the kernel log since boot."""

    boot_id: str
    by: str
    """Who reads it: "/dev/kmsg" or "node service"."""
    opened: Seconds
    """CLOCK_BOOTTIME when this reader began, which tells two readers apart."""
    oldest: int
    """Number of the first record that it saw; -1: none."""
    seq: int
    """Number of the newest record that was read; -1: none."""
    clock: Seconds
    """Now, on the kernel log's clock."""
    lines: tuple[Line, ...] = ()
    """Oldest first. A storm of the same leaves the newest few."""
    read: int = 0
    garbage: int = 0
    """Records that could not be taken apart."""
    overruns: int = 0
    """Times that the kernel overwrote records before they were read."""
    lost: int = 0
    """Records that are missing between those that were read."""
    forgotten: int = 0
    """Lines that a rule knows, but that are not kept: too many of the same."""
    pstore: tuple[str, ...] | None = None
    """Names of files that a crashed kernel left; None: they cannot be seen."""
    ours: Ours = Ours()
