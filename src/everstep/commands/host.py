"""Facts about this host that `everstep run` needs: addresses, cores, GPUs, torch.

Only looks. It must not import torch, and above all not start CUDA: the processes that are forked
later could not use it.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

from everstep.commands.check_choice import read_limits
from everstep.commands.flags import RunFlags
from everstep.commands.plan import (
    Address,
    HostFacts,
    Plan,
    endpoint_of,
    is_unit,
)
from everstep.model import UserError

_GPU_FILE = re.compile(r"nvidia\d+")
_ANY_PORT = 9
"""A port for the routing question of `address_towards`; nothing is ever sent to it."""


def facts_of_this_host(flags: RunFlags, state: Path, environ: Mapping[str, str]) -> HostFacts:
    endpoint = endpoint_of(flags)
    return HostFacts(
        state_dir=str(state),
        working_dir=os.getcwd(),
        cpus=len(os.sched_getaffinity(0)),
        gpus=gpu_count(environ.get("CUDA_VISIBLE_DEVICES"), Path("/dev")),
        uid=secrets.token_hex(4),
        endpoint_here=endpoint is not None and is_here(endpoint.host),
        check_limits=read_limits(Path(flags.check_limits)) if flags.check_limits else {},
        units=slurm_units(environ),
        script_root=script_root(flags),
        source_roots=tuple(_source_root(directory) for directory in flags.source_root),
    )


def script_root(flags: RunFlags) -> str:
    """What Python puts in front of sys.path: the directory of the script, or the script itself if
    that is one; with -m the working directory.
    """
    if flags.module:
        return os.path.realpath(".")
    script = Path(os.path.realpath(flags.script))
    return str(script if script.is_dir() else script.parent)


def _source_root(directory: str) -> str:
    if not Path(directory).is_dir():
        raise UserError(f"--source-root {directory} is not a directory: give one of your code.")
    return os.path.realpath(directory)


def slurm_units(environ: Mapping[str, str]) -> tuple[str, ...]:
    """What Slurm's topology plugin says of this host: the nearest one of each kind.

    SLURM_TOPOLOGY_ADDR is the way to it, "spine.leaf1.node1", and _PATTERN names the kinds on it,
    "switch.switch.node" (srun(1), output environment variables).
    """
    kinds = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    names = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".", len(kinds) - 1)
    if len(names) != len(kinds):
        return ()
    nearest = {
        kind: name
        for kind, name in zip(kinds, names, strict=True)
        if kind != "node" and is_unit(f"{kind}:{name}")
    }
    return tuple(f"{kind}:{name}" for kind, name in nearest.items())


def gpu_count(visible: str | None, devices: Path) -> int:
    """GPUs that a rank would see, from CUDA_VISIBLE_DEVICES and the device files.

    A container sees the device files of its own GPUs only. An entry -1 ends the list, as it does
    for CUDA.
    """
    if visible is None:
        return sum(1 for entry in devices.iterdir() if _GPU_FILE.fullmatch(entry.name))
    count = 0
    for entry in (part.strip() for part in visible.split(",")):
        if not entry or entry.startswith("-"):
            break
        count += 1
    return count


def is_here(host: str) -> bool:
    """Whether this name or address is one of this host: something can be bound to it."""
    for address in _resolve(host):
        if ipaddress.ip_address(address).is_loopback or _binds(address, 0):
            return True
    return False


def port_is_free(address: Address) -> bool:
    return address.port == 0 or _binds(address.bind, address.port)


def address_towards(host: str) -> str:
    """The address of this host that a packet to `host` would leave from."""
    for address in _resolve(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, _ANY_PORT))
            except OSError:
                continue
            return str(probe.getsockname()[0])
    raise UserError(
        f"{host} cannot be resolved or reached from here: check --rdzv-endpoint or --master-addr, "
        "and give --local-addr if it is right."
    )


def check_runnable(made: Plan) -> None:
    """Refuse at once what every rank would die of: no script, no torch, no working directory."""
    spec = made.spec
    if not spec.no_python and importlib.util.find_spec("torch") is None:
        raise UserError(
            "torch is not installed in this Python: install the torch that your script needs "
            "(pip install torch), or give --no-python for a program that needs none."
        )
    missing = [name for name in spec.preload if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"--preload {missing[0]}: there is no installed package of that name.")
    if spec.module or spec.no_python:
        return
    script = Path(spec.working_dir) / spec.command[0]
    if not script.exists():
        raise UserError(
            f"There is no script {script}: check the path (the first word that is "
            "not a flag is the script)."
        )
    if not os.access(script, os.R_OK):
        raise UserError(f"The script {script} cannot be read: check its permissions.")


def _resolve(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        return []
    return [str(entry[4][0]).partition("%")[0] for entry in found]


def _binds(address: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: an address in TIME_WAIT is free, one that is listened on is not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True
