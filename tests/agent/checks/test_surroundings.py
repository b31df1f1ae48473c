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
from everstep.agent.checks.kernel.kmsg import boot_id
from everstep.agent.checks.surroundings import (
    NO_GPU,
    Surroundings,
    gpus_of,
    interface_of,
    picked,
)
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
    assert boot_id(tmp_path) == ""


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


def shown_gpus(root: Path, *models: str) -> str:
    for number, model in enumerate(models):
        gpu = root / f"proc/driver/nvidia/gpus/0000:{number:02x}:00.0"
        gpu.mkdir(parents=True)
        text = f"Model: \t\t {model}\nIRQ: 16\nGPU UUID: \t GPU-{number}{number}-abc\n"
        (gpu / "information").write_text(text)
    return str(root)


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, ()),
        ("1,3", ("0000:01:00.0", "0000:03:00.0")),
        ("0", ("0000:00:00.0",)),
        ("GPU-22,GPU-00-abc", ("0000:02:00.0", "0000:00:00.0")),
        ("7", ()),
        ("GPU-", ()),
        ("MIG-GPU-1/0/0", ()),
        ("0,,1", ()),
        ("", (NO_GPU,)),
        ("-1", (NO_GPU,)),
    ],
)
def test_the_gpus_of_the_job(tmp_path: Path, visible: str | None, found: tuple[str, ...]) -> None:
    root = shown_gpus(tmp_path, *["NVIDIA H100 80GB HBM3"] * 4)
    assert gpus_of(visible, root) == found


def test_numbers_of_unlike_gpus_mean_nothing(tmp_path: Path) -> None:
    """CUDA counts the fastest first."""
    root = shown_gpus(tmp_path, "NVIDIA T400", "NVIDIA H100 80GB HBM3")
    assert gpus_of("0", root) == ()
    assert gpus_of("GPU-11-abc", root) == ("0000:01:00.0",)
    assert gpus_of("0", str(tmp_path / "nowhere")) == ()


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
        {
            "GLOO_SOCKET_IFNAME": "eth7",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_HCA": "mlx5_0:1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        checkpoint=checkpoint,
        env={"GLOO_SOCKET_IFNAME": "eth8"},
    ).now()
    assert here.interfaces == ("eth8", "lo", "ib0")
    assert here.hcas == ("mlx5_0",), "also if it is gone"
    assert here.gpus == (NO_GPU,)
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
