"""From a fault to evidence about it in the controller's core: the rows of ByteRobust's Table 3.

One job trains on four hosts (network namespaces of this machine; real links and switches, the real
kernel log, NVIDIA's management library played by one of the same ABI) with no machine to spare, so
that nothing is evicted and every fault can be done several times. The time runs from just before
the fault to the record of the controller's journal that holds the alert, or for a switch the first
answer of a peer that cannot reach a machine behind it. Beside it stand the paper's interval and the
time after which the framework itself would give up. As root.

    python bench/detection.py [--quick] [--json FILE]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from form import Row, arguments, report
from torch.distributed.constants import default_pg_timeout

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from everstep.cluster.cleanup import clean_job
from everstep.events import AlertRaised, MachineProbed
from everstep.model import JobId
from everstep.paths import JobPaths
from everstep.processes import Process, descendants, read_pid_file
from tests.agent.checks.gpu.fake import FakeNvml
from tests.integration.network import RAIL
from tests.integration.spread import Size, Spread, over, spread

HOSTS, LEAVES = 4, 2
GPU_HOST = 1
"""The host with the GPUs."""
PATIENCE_S = 120.0
SWITCH = 1
"""The leaf switch that fails last: the controller is behind the other one."""


class Plan(NamedTuple):
    """How often everything is done."""

    rounds: int
    cpu_s: float
    """Seconds over which processor time is compared."""


QUICK = Plan(rounds=1, cpu_s=10.0)
WHOLE = Plan(rounds=3, cpu_s=120.0)
PAPER_S = {
    "nic_down_s": 30,
    "port_flap_s": 30,
    "switch_down_s": 60,
    "gpu_hang_s": 10,
    "gpu_lost_s": 10,
    "gpu_hot_s": 10,
    "kernel_fault_s": 2,
}
"""Table 3, with inspection."""


def main() -> None:
    args = arguments("Seconds from a fault to evidence in the core.")
    plan = QUICK if args.quick else WHOLE
    if os.geteuid() != 0:
        sys.exit(
            "bench/detection.py makes network namespaces and writes to the kernel log: as root"
        )
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        directory = Path(name)
        seconds = _detect(directory / "faults", plan)
        share = _cpu_share(directory / "cpu", plan)
    rows = [
        Row(key, median(seconds[key]), at_most=paper, note=_note(seconds[key]))
        for key, paper in PAPER_S.items()
    ]
    framework = default_pg_timeout.total_seconds()
    rows.append(Row("framework_timeout_s", framework, note="gloo's default, as torch has it"))
    rows.append(Row("checks_cpu_share", share, at_most=0.01, note="of one core, children included"))
    report(rows, args.json)


def _note(found: Sequence[float]) -> str:
    return f"worst of {len(found)}: {max(found):.2f}" if len(found) > 1 else "once"


# --- the faults ----------------------------------------------------------------------------------


class Faults:
    """All that is done to one job, in an order in which the former does not hide the next."""

    def __init__(self, job: Spread, fake: FakeNvml, plan: Plan) -> None:
        self._job = job
        self._fake = fake
        self._plan = plan
        self._read = 0

    def all(self) -> dict[str, list[float]]:
        hosts = [GPU_HOST, 2, 3][: self._plan.rounds]
        gpus = range(self._plan.rounds)
        return {
            "port_flap_s": [self._flap(host) for host in hosts],
            "nic_down_s": [self._cut(host) for host in hosts],
            "gpu_hot_s": [self._hot(gpu) for gpu in gpus],
            "kernel_fault_s": [self._kernel(gpu + 3) for gpu in gpus],
            "gpu_lost_s": [self._lost(gpu) for gpu in gpus],
            "gpu_hang_s": [self._hang()],
            "switch_down_s": [self._switch()],
        }

    def _flap(self, host: int) -> float:
        def flap() -> None:
            self._job.net.cut(host, RAIL)
            self._job.net.mend(host, RAIL)

        return self._told(flap, host, "net.link")

    def _cut(self, host: int) -> float:
        """After a pause in which the flap's alert may be told again."""
        time.sleep(31.0)
        took = self._told(lambda: self._job.net.cut(host, RAIL), host, "net.link")
        self._job.net.mend(host, RAIL)
        return took

    def _hot(self, gpu: int) -> float:
        fault = lambda: self._fake.value("nvmlDeviceGetTemperature", 97, gpu)  # noqa: E731
        return self._told(fault, GPU_HOST, "gpu.temperature")

    def _lost(self, gpu: int) -> float:
        return self._told(lambda: self._fake.fail("*", 15, gpu), GPU_HOST, "gpu.lost")

    def _hang(self) -> float:
        return self._told(
            lambda: self._fake.hang("nvmlDeviceGetTemperature"), GPU_HOST, "gpu.driver"
        )

    def _kernel(self, gpu: int) -> float:
        pci = self._fake.pci(gpu)
        line = f"NVRM: Xid (PCI:{pci[:-2]}): 79, pid=1, name=python3, GPU has fallen off the bus."
        return self._told(lambda: _to_kernel_log(line), GPU_HOST, "kernel.xid")

    def _switch(self) -> float:
        before = self._now(lambda: self._job.net.switch_down(SWITCH))
        return self._first(
            lambda event: isinstance(event, MachineProbed) and not event.reachable, before
        )

    # --- when it was known ---

    def _told(self, fault: Callable[[], None], host: int, check: str) -> float:
        machine = self._job.machine(host).machine

        def says(event: object) -> bool:
            if not isinstance(event, AlertRaised) or event.machine != machine:
                return False
            return event.alert.result.check == check

        return self._first(says, self._now(fault))

    def _now(self, fault: Callable[[], None]) -> float:
        before = time.time()
        fault()
        return before

    def _first(self, holds: Callable[[object], bool], since: float) -> float:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for record in self._job.records():
                if record.time >= since and holds(record.event):
                    return record.time - since
            time.sleep(0.1)
        return float("inf")


def _to_kernel_log(line: str) -> None:
    with Path("/dev/kmsg").open("w") as kmsg:
        kmsg.write(line)


def _detect(directory: Path, plan: Plan) -> dict[str, list[float]]:
    directory.mkdir()
    fake = FakeNvml(directory / "nvml")
    everywhere = over(RAIL)
    with spread(directory, Size(nnodes=HOSTS, standbys=0), LEAVES) as job:
        job.start(lambda host: {**everywhere(host), **(fake.env if host == GPU_HOST else {})})
        return Faults(job, fake, plan).all()


# --- what it costs -------------------------------------------------------------------------------


def _cpu_share(directory: Path, plan: Plan) -> float:
    """Processor time of an agent with all checks, less that of one without, per second."""
    fake = FakeNvml(directory / "nvml")
    with (
        _idle(directory, "with", fake.env) as checked,
        _idle(directory, "without", fake.env, "--no-checks") as bare,
    ):
        time.sleep(5.0)  # what the start costs is no load
        before = _cpu_s(checked), _cpu_s(bare)
        time.sleep(plan.cpu_s)
        after = _cpu_s(checked), _cpu_s(bare)
    spent = [b - a for a, b in zip(before, after, strict=True)]
    return (spent[0] - spent[1]) / plan.cpu_s


@contextmanager
def _idle(directory: Path, name: str, environ: dict[str, str], *flags: str) -> Iterator[Process]:
    """The agent of a job whose only rank sleeps."""
    state = directory / name
    script = directory / "sleep.py"
    script.write_text("import time\ntime.sleep(3600)\n")
    job = JobPaths(state, JobId(name))
    argv = [sys.executable, "-m", "everstep", "run", "--standalone", "--detach", "--job", name]
    try:
        subprocess.run(
            [*argv, *flags, str(script)],
            env={**os.environ, **environ, "EVERSTEP_HOME": str(state)},
            cwd=directory,
            check=True,
            capture_output=True,
        )
        yield _agent(job)
    finally:
        clean_job(job.root)


def _agent(job: JobPaths) -> Process:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for pid_file in job.machines.glob("*/agent.pid"):
            agent = read_pid_file(pid_file)
            if agent is not None:
                return agent
        time.sleep(0.05)
    sys.exit(f"no agent came up: see {job.root}")


def _cpu_s(agent: Process) -> float:
    """Of the agent, its living children, and those that have ended."""
    ticks = 0
    for process in (agent, *descendants([agent])):
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
