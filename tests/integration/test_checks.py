"""What checks and monitors say of machines, and what a real job does about it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx2
import msgspec

from everstep.actions import StartRanks
from everstep.cluster.keepers import SETUP_NAME, controller_keeper
from everstep.cluster.keepers import command as keeper_command
from everstep.controller.gate import ALERTMANAGER, FINDINGS, findings_token
from everstep.controller.views import AlertView, StatusView
from everstep.core.state import Phase
from everstep.diagnosis.words import Verdict
from everstep.events import RankExited
from everstep.files import read_json, write_atomically
from everstep.model import ChecksSpec, MachineId
from everstep.paths import Endpoint, shm_dir
from everstep.processes import send_signal
from tests.agent.checks.gpu.fake import FakeNvml
from tests.agent.checks.host.support import cgroup
from tests.agent.checks.kernel.kernel_logs import NOBODY, alone, own_address, write
from tests.integration.network import ETH
from tests.integration.spread import Size, Spread, over, spread
from tests.integration.support import STEPS, Job, job, wait_for

GPU_IS_LOST = 15

WITH_PIDS = """
import os, pathlib
mine = pathlib.Path(f"pid-{os.environ['RANK']}.new")
mine.write_text(str(os.getpid()))
mine.rename(mine.with_suffix(""))
"""


# --- a job over hosts with GPUs ------------------------------------------------------------------


class Gpus:
    """Hosts of which all but the first have GPUs, at addresses that no other host has."""

    def __init__(self, directory: Path, hosts: int) -> None:
        self.pci = {host: own_address() for host in range(1, hosts)}
        self.driver = {host: FakeNvml(directory / f"nvml-{host}", 2) for host in self.pci}
        self._directory = directory

    def put_into(self, job: Spread) -> None:
        for host, pci in self.pci.items():
            bus = self._directory / f"pci-{host}"
            device = bus / pci
            device.mkdir(parents=True)
            (device / "vendor").write_text("0x10de\n")
            (device / "class").write_text("0x030200\n")
            job.net.show(host, bus, "/sys/bus/pci/devices")

    def environ(self, host: int) -> Mapping[str, str]:
        driver = self.driver.get(host)
        return {**over(ETH)(host), **(driver.env if driver is not None else {})}


def test_a_gpu_that_is_lost_or_has_an_xid_costs_its_machine_alone(tmp_path: Path) -> None:
    with spread(tmp_path, Size(nnodes=2, standbys=2)) as job:
        gpus = Gpus(tmp_path, 4)
        gpus.put_into(job)
        job.start(gpus.environ)

        # Its driver says that a GPU is lost: nothing has failed yet, and nothing is lost.
        host = next(host for host in (job.host_at(1), job.host_at(0)) if host in gpus.pci)
        victim = job.machine(host).machine
        gpus.driver[host].fail("*", GPU_IS_LOST, gpu=1)
        _trains_as(job, generation=2)
        (incident,) = job.incidents()
        assert incident.evicted == (victim,)
        assert incident.failures == ()
        assert "GPU is lost" in incident.symptom
        assert incident.symptom.startswith(f"machine {victim} is accused: gpu.")
        assert incident.restored in {incident.furthest, incident.furthest - 1}
        assert victim in _asked_for_shards(job, generation=2)
        assert not [r for r in job.records() if isinstance(r.event, RankExited)]

        # The kernel log, which all hosts share, names a GPU that only one of them has.
        host = next(host for host in (job.host_at(1), job.host_at(0)) if host in gpus.pci)
        victim = job.machine(host).machine
        with alone():
            write(f"NVRM: Xid (PCI:{gpus.pci[host]}): 79, GPU has fallen off the bus.")
            job.wait(lambda status: status.generation > 2, "it is noticed")
        _trains_as(job, generation=3)
        _, incident = job.incidents()
        assert incident.evicted == (victim,)
        assert f"kernel.xid says of GPU {gpus.pci[host]}" in incident.symptom
        assert not [note for note in _status(job).notes if "accused" in note]


def _trains_as(job: Spread, generation: int) -> None:
    job.wait(
        lambda s: s.phase is Phase.RUNNING and s.generation == generation and s.incident is None,
        f"generation {generation} trains and has caught up",
    )


def _status(job: Spread) -> StatusView:
    return job.wait(lambda _: True, "a status")


def _asked_for_shards(job: Spread, generation: int) -> set[MachineId]:
    """Machines that others fetched shards from for this generation."""
    actions = [action for record in job.records() for action in record.actions]
    starts = [a for a in actions if isinstance(a, StartRanks) and a.generation == generation]
    return {peer.machine for start in starts for peer in start.fetch}


# --- jobs of stand-ins ---------------------------------------------------------------------------


def test_a_kernel_that_says_it_is_broken_costs_no_stand_in(tmp_path: Path) -> None:
    # Elsewhere this line is but a warning, and other jobs on this kernel read it, too.
    grave = ChecksSpec(limits={"kernel.log": {"verdicts": {"kernel.files": "evict"}}})
    with job(tmp_path, standbys=1, checks=grave) as running:
        running.start()
        machines = [MachineId(f"m{number}") for number in range(3)]
        wait_for("baselines", lambda: all(_reads_the_kernel_log(running, m) for m in machines))
        with alone():
            write("VFS: file-max limit 9223372036854775807 reached")
            running.wait(lambda s: len(_evicting(s, "kernel.log")) == 3, "all to say so")
        page = "the standbys run on the same kernel"
        status = running.wait(lambda s: page in " ".join(s.notes), "somebody to be told")
        goal = status.finished_by_all + 50
        status = running.wait(lambda s: s.finished_by_all > goal, "training to go on")
        assert status.generation == 1
        assert {machine.condition for machine in status.machines} == {"member", "standby"}
        assert running.incidents().incidents == ()


def test_who_is_named_by_a_monitor_goes_and_so_does_who_cannot_end_its_ranks(
    tmp_path: Path,
) -> None:
    at_once = ChecksSpec(limits={"host.dstate": {"rounds": 1}})
    with job(tmp_path, WITH_PIDS + STEPS, standbys=1, checks=at_once) as running:
        running.start()
        running.wait(lambda s: len(s.machines) == 3 and _advances(s), "all machines")

        # Of two monitors one says evict. The other is but grave.
        _tell(running, ALERTMANAGER, _firing("m0", "critical"))
        _tell(running, FINDINGS, {"findings": [_finding("m1", "evict")]})
        running.wait(lambda s: s.generation == 2 and _advances(s), "training without m1")
        assert running.machine("m1").condition == "evicted"
        assert running.machine("m0").condition == "member"
        (told,) = running.incidents().incidents
        assert told.evicted == ("m1",)
        assert told.symptom == "machine m1 is accused: DiskFault (site) says of nvme0: lost data"
        running.wait(lambda s: s.incident is None and _ready(s), "another standby")
        assert re.search(r"m0 +NodeSick/critical +suspect .* everstep", _shown(running))

        # A rank hangs where no signal reaches it. Its next agent looks at once, and sees that.
        with cgroup("freezer") as group:
            frozen = int((tmp_path / "pid-1").read_text())
            (group / "cgroup.procs").write_text(str(frozen))
            (group / "freezer.state").write_text("FROZEN")
            agent = running.service("m2", "agent")
            assert agent is not None
            send_signal(agent, signal.SIGKILL)
            # A single round may also catch another task that just waits for a disk.
            status = running.wait(lambda s: _about(s, f"pid {frozen}"), "the check to see it")
            (alert,) = _about(status, f"pid {frozen}")
            assert (alert.machine, alert.check) == ("m2", "host.dstate")
            assert (alert.verdict, status.generation) == (Verdict.SUSPECT, 2)

            # Its peer dies. The frozen one cannot be proven gone, and its machine goes instead.
            running.order("/v1/inject", fault="kill-rank", rank=0)
            running.wait(lambda s: s.generation == 3 and _advances(s), "training without m2")
            assert Path(f"/proc/{frozen}").exists()
            gone = running.machine("m2")
            assert (gone.condition, gone.why) == (
                "evicted",
                f"its old ranks could not be killed (pids {frozen})",
            )
            assert running.machine("m3").node_rank == 1


def test_an_ordinary_user_hears_of_the_kernel_log_from_the_node_service(tmp_path: Path) -> None:
    socket = tmp_path / "node.sock"
    checks = ChecksSpec(node_socket=str(socket))
    with job(tmp_path, WITH_PIDS + STEPS, checks=checks) as running:
        _start_as_nobody(running, tmp_path)
        running.wait(_advances, "training")
        log = running.paths.machine(MachineId("m0")).log("agent")
        reason = "/dev/kmsg cannot be read: Operation not permitted, and no node service"
        wait_for("what it cannot see", lambda: reason in log.read_text())
        agent = running.service("m0", "agent")
        with _node_service(socket):
            machines = [MachineId("m0"), MachineId("m1")]
            wait_for("baselines", lambda: all(_reads_the_kernel_log(running, m) for m in machines))
            pid = int((tmp_path / "pid-1").read_text())
            with alone():
                write(f"INFO: task python:{pid} blocked for more than 120 seconds.")
                item = f"{pid} kernel.hung-task"
                status = running.wait(lambda s: _about(s, item), "the line to be told")
        (alert,) = _about(status, item)
        assert (alert.machine, alert.check) == ("m1", "kernel.log")
        goal = running.wait(_advances, "training").finished_by_all + 50
        running.wait(lambda s: s.finished_by_all > goal, "training to go on")
        assert running.service("m0", "agent") == agent
        assert running.incidents().incidents == ()


def _start_as_nobody(running: Job, directory: Path) -> None:
    """As that user, who may read what the tests need of root's files and not the kernel log."""
    # access(2) knows no capabilities, so that a rank would not find our interpreter.
    command = ("/bin/sh", "-c", f"exec {sys.executable} train.py")
    write_atomically(running.paths.spec, msgspec.structs.replace(running.spec, command=command))
    keeper = running.paths.root / SETUP_NAME
    write_atomically(keeper, controller_keeper(running.paths, []))
    subprocess.run(["chown", "--recursive", f"{NOBODY}:{NOBODY}", str(directory)], check=True)
    caps = "-all,+dac_read_search"
    user = [
        "setsid",
        "--fork",
        "setpriv",
        f"--reuid={NOBODY}",
        f"--regid={NOBODY}",
        "--clear-groups",
    ]
    user += [f"--{kind}={caps}" for kind in ("inh-caps", "ambient-caps", "bounding-set")]
    with running.paths.keeper_log.open("ab") as log:
        subprocess.run([*user, *keeper_command(keeper)], stdout=log, stderr=log, check=True)


@contextmanager
def _node_service(socket: Path) -> Iterator[None]:
    words = [sys.executable, "-m", "everstep", "check", "--serve", "--socket", str(socket)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as service:
        try:
            yield
        finally:
            service.terminate()
    assert not socket.exists()


def _reads_the_kernel_log(running: Job, machine: MachineId) -> bool:
    """What is written from now on is new to this machine."""
    kept = shm_dir(running.spec.job, running.spec.uid, machine) / "checks"
    return kept.exists() and "kernel" in msgspec.msgpack.decode(kept.read_bytes())["histories"]


def _evicting(status: StatusView, check: str) -> list[AlertView]:
    return [alert for alert in _of(status, check) if alert.verdict is Verdict.EVICT]


def _shown(running: Job) -> str:
    """What `everstep status` prints."""
    state = ("--state-dir", str(running.paths.root.parent))
    done = subprocess.run(
        [sys.executable, "-m", "everstep", "status", *state, running.spec.job],
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _advances(status: StatusView) -> bool:
    return status.phase is Phase.RUNNING and status.finished_by_all > 0


def _ready(status: StatusView) -> bool:
    return sum(machine.condition == "standby" for machine in status.machines) == 1


def _of(status: StatusView, check: str) -> list[AlertView]:
    return [alert for alert in status.alerts if alert.check == check]


def _about(status: StatusView, item: str) -> list[AlertView]:
    return [alert for alert in status.alerts if alert.item == item]


def _finding(machine: str, verdict: str) -> dict[str, object]:
    return {
        "machine": machine,
        "item": "nvme0",
        "verdict": verdict,
        "at": time.time(),
        "text": "lost data",
        "source": "site",
        "check": "DiskFault",
    }


def _firing(machine: str, severity: str) -> dict[str, object]:
    labels = {"alertname": "NodeSick", "machine": machine, "severity": severity}
    alert = {"status": "firing", "labels": labels, "startsAt": time.time()}
    return {"version": "4", "receiver": "everstep", "alerts": [alert]}


def _tell(running: Job, path: str, body: object) -> None:
    """What a monitor does that has the token for findings."""
    response = httpx2.post(
        read_json(running.paths.endpoint, Endpoint).url + path,
        headers={"Authorization": f"Bearer {findings_token('secret')}"},
        content=msgspec.json.encode(body),
        trust_env=False,
        timeout=10.0,
    )
    assert response.status_code == 200, response.text
