"""Whom a line of the kernel log accuses: the machine, only if it names what the job uses of it.

Pure. A disk, a device or a process that is not the job's may break without any harm to it, and a
job that blames machines for that runs out of machines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from everstep.agent.checks import xids
from everstep.agent.checks.kernel.lines import Line, Ours
from everstep.agent.checks.kernel.table import About, KernelRule

_OWN_GROUP = {About.MOUNT: "server", About.HOST: ""}


def pci_address(text: str) -> str:
    """In one spelling; what is no address comes back as it is."""
    return xids.pci_address(text) or text


def thing_of(rule: KernelRule, names: Mapping[str, str]) -> str:
    """What the line is about, in one spelling; empty: the machine, or the line does not say."""
    if rule.about is About.HOST:
        return ""
    if rule.about is About.INTERFACE and "interface" not in names:
        return pci_address(names.get("pci", ""))
    found = names.get(_OWN_GROUP.get(rule.about, rule.about.value), "")
    return pci_address(found) if rule.about is About.PCI else found


def is_ours(rule: KernelRule, names: Mapping[str, str], ours: Ours) -> bool:
    """Whether the line speaks of what the job uses."""
    return _OURS[rule.about](names, ours)


def pid_is_ours(pid: str, ours: Ours) -> bool:
    return pid.isdecimal() and int(pid) in ours.pids


def cgroup_is_ours(path: str, ours: Ours) -> bool:
    """Whether it is a cgroup of a rank, or one below.

    In a container its path is not known, but the id of pod or container that stands in it: "*ID".
    Drivers of cgroups write a pod's id with underscores.
    """
    spelled = path.replace("_", "-")
    return any(
        own[1:] in spelled if own.startswith("*") else path == own or path.startswith(f"{own}/")
        for own in ours.cgroups
    )


def same_thing(rule: KernelRule, line: Line, other: Line) -> bool:
    """Whether a line that heals is about the same as one of `rule`.

    Lustre names a target when it is lost and sometimes only its server when it is back.
    """
    told = {line.names.get("server"), line.names.get("peer")} - {None}
    if rule.about is About.MOUNT:
        return bool(told & {other.names.get("server"), other.names.get("peer")})
    return thing_of(rule, line.names) == thing_of(rule, other.names)


def _in_pci(names: Mapping[str, str], ours: Ours) -> bool:
    named = names.get("pci", "")
    return bool(named) and pci_address(named) in ours.pci


def _serves_us(names: Mapping[str, str], ours: Ours) -> bool:
    """Servers are named as they were mounted; targets of Lustre begin with the file system."""
    server = names.get("server", "")
    return server in ours.servers or server.partition("-")[0] in ours.servers


_OURS: Mapping[About, Callable[[Mapping[str, str], Ours], bool]] = {
    About.HOST: lambda _names, _ours: True,
    About.PCI: _in_pci,
    About.DISK: lambda names, ours: names.get("disk", "") in ours.disks,
    About.INTERFACE: lambda names, ours: (
        names.get("interface", "") in ours.interfaces or _in_pci(names, ours)
    ),
    About.PID: lambda names, ours: pid_is_ours(names.get("pid", ""), ours),
    About.CGROUP: lambda names, ours: cgroup_is_ours(names.get("cgroup", ""), ours),
    About.MOUNT: _serves_us,
}
