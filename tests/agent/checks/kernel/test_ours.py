"""What of a machine is the job's: a made-up machine below a root of its own, and real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from everstep.agent.checks.check import Here
from everstep.agent.checks.kernel.ours import Inventory, fuse_connections

GPU = "pci0000:4d/0000:4d:01.0/0000:52:00.0"
SWITCH = "pci0000:4d/0000:4d:02.0/0000:53:00.0"
NIC = "pci0000:a0/0000:a0:01.0/0000:a1:00.0"
HCA = "pci0000:b0/0000:b0:01.0/0000:b1:00.0"
VGA = "pci0000:00/0000:00:1c.0/0000:02:00.0"
NVME = "pci0000:10/0000:10:01.0/0000:11:00.0/nvme/nvme3/nvme3n1"
SPARE = "pci0000:20/0000:20:01.0/0000:21:00.0/nvme/nvme4/nvme4n1"
MOUNTS = """\
22 27 0:21 / /proc rw - proc proc rw
27 1 9:127 / / rw - ext4 /dev/md127 rw
30 27 259:9 / /scratch rw - xfs /dev/nvme4n1 rw
31 27 0:50 / /data rw - nfs4 store-3:/export/data rw
32 27 0:51 / /data/fast rw - lustre 10.0.0.1@o2ib:10.0.0.2@o2ib:/lus/part rw
33 27 0:52 / /bucket rw - fuse.gcsfuse bucket rw
34 27 0:53 / /other rw - nfs other:/x rw
35 27 0:54 / /with\\040space rw - nfs [fd00::9]:/x rw
"""


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def machine(root: Path) -> None:
    devices = root / "sys/devices"
    for place, kind, vendor in (
        (GPU, "0x030200", "0x10de"),
        (SWITCH, "0x068000", "0x10de"),
        (VGA, "0x030000", "0x1a03"),
        (HCA, "0x020000", "0x15b3"),
        (NIC, "0x020000", "0x14e4"),
    ):
        put(devices / place / "class", kind)
        put(devices / place / "vendor", vendor)
        link(root / "sys/bus/pci/devices" / Path(place).name, devices / place)
    link(root / "sys/class/infiniband/mlx5_0/device", devices / HCA)
    link(devices / NIC / "net/eth2/device", devices / NIC)
    link(root / "sys/class/net/eth2", devices / NIC / "net/eth2")
    bond = devices / "virtual/net/bond0"
    link(bond / "lower_eth2", devices / NIC / "net/eth2")
    link(root / "sys/class/net/bond0", bond)
    put(devices / "virtual/net/veth1/x", "")
    link(root / "sys/class/net/veth1", devices / "virtual/net/veth1")
    put(devices / NVME / "nvme3n1p1/partition", "1")
    put(devices / SPARE / "size", "1")
    link(devices / "virtual/block/md127/slaves/nvme3n1p1", devices / NVME / "nvme3n1p1")
    link(root / "sys/dev/block/9:127", devices / "virtual/block/md127")
    link(root / "sys/dev/block/259:9", devices / SPARE)
    put(root / "proc/self/mountinfo", MOUNTS)
    put(root / "proc/net/route", "Iface\tDestination\nveth1\t00000000\nbond0\t0000000A\n")
    put(
        root / "proc/driver/nvidia/gpus/0000:52:00.0/information",
        "Model: x\nGPU UUID: \t GPU-12ab\n",
    )
    put(root / "proc/7/cgroup", "4:memory:/slurm/job7\n3:cpuset:/x\n0::/\n")


def test_devices_and_the_ports_above_them_are_found(tmp_path: Path) -> None:
    machine(tmp_path)
    here = Here(root=str(tmp_path), interfaces=("bond0", "veth1"), pids=(7,))
    ours = Inventory().look(here)
    for place in (GPU, SWITCH, NIC, HCA):
        assert Path(place).name in ours.pci
        assert Path(place).parent.name in ours.pci
    assert Path(VGA).name not in ours.pci
    assert ours.interfaces == ("eth2",)
    assert {"md127", "nvme3n1p1", "nvme3n1", "nvme3", "0000:11:00.0"} <= {*ours.disks, *ours.pci}
    assert not {"nvme4", "nvme4n1"} & set(ours.disks)
    assert ours.uuids == {"GPU-12ab": "0000:52:00.0"}
    assert ours.cgroups == ("/slurm/job7",)
    assert ours.pids == (7,)


def test_gpus_and_ports_of_others_are_not_the_jobs(tmp_path: Path) -> None:
    """What it names counts, or what its container was given; and never what Azure takes away."""
    machine(tmp_path)
    other = "pci0000:4d/0000:4d:03.0/0000:54:00.0"
    put(tmp_path / "sys/devices" / other / "class", "0x030200")
    put(tmp_path / "sys/devices" / other / "vendor", "0x10de")
    link(tmp_path / "sys/bus/pci/devices/0000:54:00.0", tmp_path / "sys/devices" / other)
    root = str(tmp_path)
    assert "0000:54:00.0" not in Inventory().look(Here(root=root)).pci
    named = Inventory().look(Here(root=root, gpus=("0000:54:00.0",), hcas=("mlx5_7",)))
    assert {"0000:54:00.0", Path(SWITCH).name} <= set(named.pci)
    assert not {Path(GPU).name, Path(HCA).name} & set(named.pci)
    (tmp_path / "sys/class/infiniband/mlx5_0").rename(tmp_path / "sys/class/infiniband/mlx5_an0")
    assert Path(HCA).name not in Inventory().look(Here(root=root)).pci


def test_only_disks_and_servers_of_the_jobs_paths_count(tmp_path: Path) -> None:
    machine(tmp_path)
    paths = ("/scratch/run", "/data/fast/set", "/data/x", "/with space/y")
    ours = Inventory().look(Here(root=str(tmp_path), paths=paths))
    assert "nvme4n1" in ours.disks
    assert ours.servers == ("fd00::9", "lus", "nfs4", "store-3")
    assert Inventory().look(Here(root=str(tmp_path), paths=("/datax",))).servers == ()


def test_what_is_gone_was_the_jobs_all_the_same(tmp_path: Path) -> None:
    machine(tmp_path)
    inventory = Inventory()
    before = inventory.look(Here(root=str(tmp_path), pids=(7,)))
    for gone in ("sys/bus/pci/devices/0000:52:00.0", "proc/self/mountinfo", "proc/7/cgroup"):
        (tmp_path / gone).unlink()
    assert inventory.look(Here(root=str(tmp_path))) == before


def test_a_machine_that_shows_nothing_has_nothing(tmp_path: Path) -> None:
    ours = Inventory().look(
        Here(root=str(tmp_path), interfaces=("eth0",), paths=("/x",), pids=(1,))
    )
    assert (ours.pci, ours.disks, ours.interfaces, ours.servers) == ((), (), (), ())
    put(tmp_path / "proc/self/mountinfo", "garbage\n\n- - -\n1 2 3\n")
    assert Inventory().look(Here(root=str(tmp_path))).servers == ()


def test_in_a_container_the_pod_is_known_and_no_pid(tmp_path: Path) -> None:
    machine(tmp_path)
    pod = "0a1b2c3d-0000-1111-2222-333344445555"
    mounts = f"40 27 8:1 /var/lib/kubelet/pods/{pod}/etc-hosts /etc/hosts rw - ext4 /dev/sda1 rw\n"
    put(tmp_path / "proc/self/mountinfo", mounts)
    link(tmp_path / "proc/self/ns/pid", Path("pid:[4026532999]"))
    ours = Inventory().look(Here(root=str(tmp_path), pids=(7,)))
    assert ours.cgroups == (f"*{pod}",)
    assert ours.pids == ()


def test_children_of_ranks_are_the_jobs_and_strangers_are_not() -> None:
    with (
        subprocess.Popen(["sleep", "60"]) as child,
        subprocess.Popen(
            [sys.executable, "-S", "-c", "import subprocess, sys; subprocess.run(['cat'])"],
            stdin=subprocess.PIPE,
        ) as parent,
    ):
        here = Here(pids=(parent.pid,))
        inventory = Inventory()
        inventory.look(here)
        grandchild = _child_of(parent.pid)
        ours = inventory.look_at_processes(here, [grandchild, child.pid, os.getpid(), 1])
        assert set(ours.pids) == {parent.pid, grandchild}
        parent.communicate()
        child.kill()


def _child_of(pid: int) -> int:
    while True:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if found:
            return int(found[0])


def test_connections_of_fuse_are_those_of_the_jobs_mounts(tmp_path: Path) -> None:
    machine(tmp_path)
    assert fuse_connections(Here(root=str(tmp_path), paths=("/bucket/x", "/data"))) == {
        "/bucket": 52
    }
    assert fuse_connections(Here(root=str(tmp_path), paths=("/data",))) == {}
