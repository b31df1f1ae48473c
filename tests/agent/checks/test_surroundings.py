"""What the checks are told of the machine: from variables, from the job, from real interfaces."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.agent.checks import surroundings
from everstep.agent.checks.surroundings import Surroundings, boot_id, interface_of, picked
from everstep.agent.this_machine import ThisMachine
from everstep.files import write_atomically
from everstep.model import CheckpointSpec
from everstep.paths import Endpoint
from tests.agent.support import Job

NAMES = ["lo", "eth0", "eth1", "ib0", "ib1", "docker0"]


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("", ()),
        ("eth", ("eth0", "eth1")),
        ("ib1,eth", ("ib1", "eth0", "eth1")),
        ("=ib", ("ib",)),
        ("=eth1,eth7", ("eth1", "eth7")),
        ("^docker,lo", ()),
        ("^=eth0", ()),
        ("nothing", ()),
        (" eth0 , ,", ("eth0",)),
    ],
)
def test_nccls_way_of_naming_interfaces(said: str, found: tuple[str, ...]) -> None:
    assert picked(said, NAMES) == found


def test_gloos_names_are_names() -> None:
    assert picked("eth,ib0", NAMES, exact=True) == ("eth", "ib0")


def test_the_boot_has_a_name_where_there_is_a_kernel(tmp_path: Path) -> None:
    assert boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert boot_id(str(tmp_path)) == ""


@pytest.fixture
def link() -> Iterator[str]:
    """A real interface with addresses of both kinds."""
    name = f"es{os.getpid() % 100_000}"
    for words in (
        ["link", "add", name, "type", "veth", "peer", "name", f"{name}p"],
        ["addr", "add", "198.51.100.7/24", "dev", name],
        ["addr", "add", "198.51.100.8/24", "dev", name],
        ["addr", "add", "2001:db8::7/64", "dev", name, "nodad"],
        ["link", "set", name, "up"],
    ):
        subprocess.run(["ip", *words], check=True)
    yield name
    subprocess.run(["ip", "link", "del", name], check=True)


def test_an_interface_is_known_by_each_of_its_addresses(link: str) -> None:
    assert interface_of("198.51.100.7") == link
    assert interface_of("198.51.100.8") == link
    assert interface_of("2001:db8::7") == link
    assert interface_of("198.51.100.9") == ""
    assert interface_of("127.0.0.12") == "lo", "a stand-in's"
    assert interface_of("::1") == "lo"
    assert interface_of("some-host") == ""


@pytest.fixture
def look(tmp_path: Path) -> Callable[..., Surroundings]:
    """What the agent of a machine sees, with these fields of its setup and spec."""

    def made(
        environ: dict[str, str], setup: dict[str, Any] | None = None, **spec: Any
    ) -> Surroundings:
        job = Job(tmp_path, f"here{os.getpid()}")
        job.describe(["train.py"], **spec)
        machine = ThisMachine.read(job.machine.setup)
        changed = msgspec.structs.replace(machine.setup, **(setup or {}))
        write_atomically(job.paths.endpoint, Endpoint(url="http://192.0.2.1:29500", term=1, pid=1))
        return Surroundings(machine._replace(setup=changed), environ, lambda: [11, 12])

    return made


def test_what_the_job_needs_is_named(look: Callable[..., Surroundings], tmp_path: Path) -> None:
    checkpoint = CheckpointSpec(directory="/ckpt", local_directory="/nvme", backup_interface="ib0")
    here = look(
        {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_HCA": "=mlx5_0:1"},
        checkpoint=checkpoint,
        env={"GLOO_SOCKET_IFNAME": "eth8"},
    ).now()
    assert here.interfaces == ("eth8", "lo", "ib0")
    assert here.hcas == ("mlx5_0",)
    assert here.paths == (str(tmp_path / "work"), "/ckpt", "/nvme", str(tmp_path / "job"))
    assert here.addresses == ("192.0.2.1:29500",)
    assert here.pids == (11, 12)
    assert here.boot_id == boot_id()
    assert here.node_socket == "/run/everstep/node.sock"


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://127.0.0.1:29500", ()),
        ("http://localhost:29500", ()),
        ("http://10.9.9.9:29500", ()),
        ("http://[2001:db8::1]:29500", ("[2001:db8::1]:29500",)),
        ("http://head:1", ("head:1",)),
        ("http://head", ("head",)),
        ("http://head:port", ()),
    ],
)
def test_a_controller_elsewhere_must_be_reached(
    look: Callable[..., Surroundings], url: str, found: tuple[str, ...]
) -> None:
    here = look({}, {"endpoint_url": url, "address": "10.9.9.9"}).now()
    assert here.addresses == found


def test_a_url_is_no_path(look: Callable[..., Surroundings], tmp_path: Path) -> None:
    here = look({}, checkpoint=CheckpointSpec(directory="s3://bucket/x")).now()
    assert here.paths == (str(tmp_path / "work"), str(tmp_path / "job"))


def test_an_interface_that_has_gone_is_not_forgotten(
    look: Callable[..., Surroundings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surroundings, "LOOK_AGAIN_S", 0.0)
    names = ["eth0", "eth1"]
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(names)))
    seen = look({"NCCL_SOCKET_IFNAME": "eth"})
    assert seen.now().interfaces == ("eth0", "eth1", "lo")
    names[:] = ["eth1", "eth2"]
    assert seen.now().interfaces == ("eth0", "eth1", "lo", "eth2")
