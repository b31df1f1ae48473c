"""What checks must know of this machine and of what its job needs from it.

Used by the agent; `everstep check` on a machine without a job looks at `Here()` with its defaults.
Interfaces and devices are chosen once and only added to afterwards: one that has gone is exactly
what a check must not forget.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from everstep.agent.checks.check import Here
from everstep.agent.checks.kernel.kmsg import boot_id
from everstep.agent.checks.xids import pci_address
from everstep.agent.this_machine import ThisMachine
from everstep.checkpoint.tier import is_url
from everstep.files import FileUnreadable, read_json
from everstep.model import Seconds
from everstep.paths import Endpoint

LOOK_AGAIN_S: Seconds = 60.0
"""Between two looks for new interfaces and another controller; ranks are looked at every time."""
NO_GPU = "none"
"""Stands for GPUs where the job uses none of them."""
_SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40
"""struct ifreq of a 64-bit kernel: a name of 16 bytes, then a union of 24."""
_IFREQS_MAX = 256
_IPV4 = slice(20, 24)
"""Of struct ifreq: sin_addr of the sockaddr_in that follows the name."""


class Chosen(NamedTuple):
    """What does not change while the agent lives, except that something is added."""

    interfaces: tuple[str, ...]
    hcas: tuple[str, ...]
    gpus: tuple[str, ...]
    addresses: tuple[str, ...]


class Surroundings:
    """Makes Here for the agent of one machine."""

    def __init__(
        self,
        machine: ThisMachine,
        environ: Mapping[str, str],
        pids: Callable[[], Iterable[int]],
    ) -> None:
        """`environ`: of the agent. `pids`: of the ranks that run now."""
        self._machine = machine
        self._environ = {**environ, **machine.setup.env, **machine.spec.env}
        self._pids = pids
        self._boot_id = boot_id()
        self._chosen = Chosen((), (), (), ())
        self._look_at = 0.0

    def now(self) -> Here:
        """As it is now."""
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_AGAIN_S
            self._chosen = self._choose()
        return Here(
            boot_id=self._boot_id,
            interfaces=self._chosen.interfaces,
            hcas=self._chosen.hcas,
            gpus=self._chosen.gpus,
            paths=self._paths(),
            addresses=self._chosen.addresses,
            pids=tuple(self._pids()),
            node_socket=self._machine.spec.checks.node_socket,
        )

    def _choose(self) -> Chosen:
        setup, spec, environ = self._machine.setup, self._machine.spec, self._environ
        try:
            names = [name for _, name in socket.if_nameindex()]
        except OSError:
            names = []
        interfaces = [
            *picked(environ.get("GLOO_SOCKET_IFNAME", ""), names, exact=True),
            *picked(environ.get("NCCL_SOCKET_IFNAME", ""), names),
            spec.checkpoint.backup_interface,
            interface_of(setup.address),
        ]
        former = self._chosen
        return Chosen(
            _added(former.interfaces, interfaces),
            _added(former.hcas, self._hcas()),
            former.gpus or gpus_of(self._environ.get("CUDA_VISIBLE_DEVICES")),
            _added((), [self._controller()]),
        )

    def _hcas(self) -> tuple[str, ...]:
        try:
            names = sorted(entry.name for entry in Path("/sys/class/infiniband").iterdir())
        except OSError:
            names = []
        # A port may be named besides, as in mlx5_0:1.
        parts = self._environ.get("NCCL_IB_HCA", "").split(",")
        said = ",".join(each.partition(":")[0] for each in parts)
        if said.startswith("^"):
            unused = picked(said[1:], names)
            return tuple(name for name in names if name not in unused)
        # Also what is named and gone: an agent that was started anew does not see it.
        exact = said.startswith("=")
        return _added(picked(said, names, exact=exact), picked(said, names, exact=True))

    def _paths(self) -> tuple[str, ...]:
        spec, setup = self._machine.spec, self._machine.setup
        directory = "" if is_url(spec.checkpoint.directory) else spec.checkpoint.directory
        local = spec.checkpoint.local_directory
        return _added((), [spec.working_dir, directory, local, setup.job_dir])

    def _controller(self) -> str:
        """HOST:PORT of the controller, unless it is on this machine."""
        url = self._machine.setup.endpoint_url
        try:
            parts = urlsplit(url or read_json(self._machine.job.endpoint, Endpoint).url)
            host, port = parts.hostname or "", parts.port
        except (FileUnreadable, ValueError):
            return self._chosen.addresses[0] if self._chosen.addresses else ""
        if host in ("", "localhost", self._machine.setup.address) or _is_loopback(host):
            return ""
        host = f"[{host}]" if ":" in host else host
        return host if port is None else f"{host}:{port}"


def gpus_of(visible: str | None, root: str = "/") -> tuple[str, ...]:
    """PCI addresses of the NVIDIA GPUs that CUDA_VISIBLE_DEVICES chooses; empty: all, or not known.

    CUDA's own numbers are in the order of addresses as long as all GPUs are of one model, else it
    is not told what they mean. Parts of GPUs (MIG) are left to be seen as a whole.
    """
    if visible is None:
        return ()
    entries = [each.strip() for each in visible.split(",")]
    if entries[0] in {"", "-1", "NoDevFiles"}:
        return (NO_GPU,)
    known = _known_gpus(Path(root))
    numbers = list(known) if len({model for model, _ in known.values()}) == 1 else []
    found: list[str] = []
    for entry in entries:
        by_uuid = [pci for pci, (_, uuid) in known.items() if entry and uuid.startswith(entry)]
        if entry.isdecimal() and int(entry) < len(numbers):
            found.append(numbers[int(entry)])
        elif entry.startswith("GPU-") and len(by_uuid) == 1:
            found += by_uuid
        else:
            return ()
    return _added((), found)


def _known_gpus(root: Path) -> dict[str, tuple[str, str]]:
    """Address -> model and UUID of each GPU that the driver shows here, in order."""
    found = {}
    try:
        for gpu in sorted((root / "proc/driver/nvidia/gpus").iterdir()):
            text = (gpu / "information").read_text("utf-8", "replace")
            lines = dict(line.partition(":")[::2] for line in text.splitlines())
            said = (lines.get(name, "").strip() for name in ("Model", "GPU UUID"))
            found[pci_address(gpu.name)] = (next(said), next(said))
    except OSError:
        return {}
    return found


def picked(said: str, names: Iterable[str], *, exact: bool = False) -> tuple[str, ...]:
    """The names that a variable of NCCL or Gloo chooses, in its order.

    NCCL's (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html): a list of prefixes, or of
    names after "=", or of what not to use after "^". Gloo's are names (`exact`). A name is kept
    even if nothing has it now. What "^" leaves over is not known to be used: nothing is chosen.
    """
    exact = exact or said.startswith("=")
    wanted = [each.strip() for each in said.removeprefix("=").split(",") if each.strip()]
    if said.startswith("^"):
        return ()
    if exact:
        return _added((), wanted)
    return _added((), [name for each in wanted for name in names if name.startswith(each)])


def interface_of(address: str) -> str:
    """The interface that has this address, IPv4 or IPv6; empty if none has, or it is a name."""
    try:
        wanted = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if wanted.is_loopback:  # stand-ins have addresses that nobody was given
        return "lo"
    found = _ipv4_interfaces() if wanted.version == 4 else _ipv6_interfaces()
    return found.get(wanted.packed, "")


def _ipv4_interfaces() -> dict[bytes, str]:
    """All addresses of all interfaces (netdevice(7))."""
    answer = array.array("B", bytes(_IFREQS_MAX * _IFREQ_BYTES))
    where, room = answer.buffer_info()
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            reply = fcntl.ioctl(asked, _SIOCGIFCONF, struct.pack("iP", room, where))
    except OSError:
        return {}
    length = struct.unpack("iP", reply)[0]
    found: dict[bytes, str] = {}
    for at in range(0, length, _IFREQ_BYTES):
        entry = answer[at : at + _IFREQ_BYTES].tobytes()
        # A label may follow the name, as in eth0:1.
        name = entry[:16].partition(b"\0")[0].decode(errors="replace").partition(":")[0]
        found[entry[_IPV4]] = name
    return found


def _ipv6_interfaces() -> dict[bytes, str]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return {}
    return {bytes.fromhex(words[0]): words[5] for line in lines if len(words := line.split()) > 5}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _added(former: tuple[str, ...], names: Iterable[str]) -> tuple[str, ...]:
    """Each once, without empty ones, the former first."""
    return tuple(dict.fromkeys([*former, *(name for name in names if name)]))
