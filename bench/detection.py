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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from form import Row, arguments, report
from torch.distributed.constants import default_pg_timeout

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from everstep.cluster.cleanup import clean_job
from everstep.diagnosis.words import Verdict
from everstep.events import AlertRaised, ControllerEvent, MachineProbed
from everstep.model import JobId
from everstep.paths import JobPaths
from everstep.processes import Process, descendants, read_pid_file
from tests.agent.checks.gpu.fake import FakeNvml
from tests.integration.network import ETH, RAIL
from tests.integration.spread import Size, Spread, over, spread

HOSTS, LEAVES = 4, 2
GPU_HOST = 1
"""The host with the GPUs."""
GPUS = 9
"""Three for each round: what was told of one is not told again."""
PATIENCE_S = 60.0
SWITCH = 1
"""The leaf switch that fails last: the controller is behind the other one."""


class Plan(NamedTuple):
    """How often everything is done."""

    rounds: int
    cpu_s: float
    """Seconds over which processor time is compared."""


QUICK = Plan(rounds=1, cpu_s=15.0)
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
_FRAMEWORK_S = default_pg_timeout.total_seconds()


def main() -> None:
    args = arguments("Seconds from a fault to evidence in the core.")
    plan = QUICK if args.quick else WHOLE
    if os.geteuid() != 0:
        sys.exit(
            "bench/detection.py makes network namespaces and writes to the kernel log: as root"
        )
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        directory = Path(name)
        with ThreadPoolExecutor() as side:
            # Processor time is not wall time: it is compared beside the rest.
            share = side.submit(_cpu_share, directory / "cpu", plan)
            seconds = _detect(directory / "faults", plan)
        rows = [_row(key, seconds[key]) for key in PAPER_S]
        rows.append(
            Row("framework_timeout_s", _FRAMEWORK_S, note="gloo's default, as torch has it")
        )
        rows.append(
            Row("checks_cpu_share", share.result(), at_most=0.01, note="of one core, with children")
        )
    report(rows, args.json)


def _row(key: str, found: Sequence[float | None]) -> Row:
    """The median; None if a fault was not noticed at all."""
    seen = [each for each in found if each is not None]
    if len(seen) < len(found):
        return Row(key, None, note=f"not noticed within {PATIENCE_S:g} s")
    return Row(key, median(seen), at_most=PAPER_S[key], note=_note(seen))


def _note(found: Sequence[float]) -> str:
    return f"worst of {len(found)}: {max(found):.2f}" if len(found) > 1 else "once"


# --- the faults ----------------------------------------------------------------------------------


class Watched(NamedTuple):
    """A fault that was made, and how evidence about it looks."""

    key: str
    since: float
    is_evidence: Callable[[ControllerEvent], bool]


class Faults:
    """All that is done to one job. Those of one list are made at once, each to something else."""

    def __init__(self, job: Spread, fake: FakeNvml, plan: Plan) -> None:
        self._job = job
        self._fake = fake
        self._plan = plan
        self._seconds: dict[str, list[float | None]] = {key: [] for key in PAPER_S}

    def all(self) -> dict[str, list[float | None]]:
        hosts = [2, 3, GPU_HOST]
        for number in range(self._plan.rounds):
            if number:  # an alert of a link is told again after half a minute
                time.sleep(31.0)
            flapped, cut = hosts[number], hosts[(number + 1) % len(hosts)]
            gpu = 3 * number
            self._await([self._flap(flapped), self._kernel(gpu)])
            self._await([self._cut(cut), self._hot(gpu + 1), self._lost(gpu + 2)])
            self._job.net.mend(cut, RAIL)
        self._await([self._hang(), self._switch()])
        return self._seconds

    # --- making them ---

    def _flap(self, host: int) -> Watched:
        def flap() -> None:
            self._job.net.cut(host, RAIL)
            self._job.net.mend(host, RAIL)

        return self._make("port_flap_s", flap, self._says(host, "net.link"))

    def _cut(self, host: int) -> Watched:
        says = self._says(host, "net.link")
        return self._make("nic_down_s", lambda: self._job.net.cut(host, RAIL), says)

    def _hot(self, gpu: int) -> Watched:
        return self._make(
            "gpu_hot_s",
            lambda: self._fake.value("nvmlDeviceGetTemperature", 91, gpu),
            self._says(GPU_HOST, "gpu.temperature", gpu),
        )

    def _lost(self, gpu: int) -> Watched:
        """Whichever check is first."""
        says = self._says(GPU_HOST, "gpu.", gpu, Verdict.EVICT)
        return self._make("gpu_lost_s", lambda: self._fake.fail("*", 15, gpu), says)

    def _hang(self) -> Watched:
        """No call returns any more."""
        names = ("gpu.driver", "gpu.answers")
        says = [self._says(GPU_HOST, name) for name in names]
        return self._make(
            "gpu_hang_s", lambda: self._fake.hang("*"), lambda event: any(s(event) for s in says)
        )

    def _kernel(self, gpu: int) -> Watched:
        pci = self._fake.pci(gpu)
        line = f"NVRM: Xid (PCI:{pci[:-2]}): 79, pid=1, name=python3, GPU has fallen off the bus."
        says = self._says(GPU_HOST, "kernel.xid", gpu)
        return self._make("kernel_fault_s", lambda: _to_kernel_log(line), says)

    def _switch(self) -> Watched:
        """Of both networks: nobody behind it trains on or is heard of."""

        def fail() -> None:
            for interface in (RAIL, ETH):
                self._job.net.switch_down(SWITCH, interface)

        return self._make(
            "switch_down_s",
            fail,
            lambda event: isinstance(event, MachineProbed) and event.reachable is False,
        )

    # --- when they were known ---

    def _make(
        self, key: str, fault: Callable[[], None], evidence: Callable[[ControllerEvent], bool]
    ) -> Watched:
        before = time.time()
        fault()
        return Watched(key, before, evidence)

    def _says(
        self, host: int, check: str, gpu: int | None = None, verdict: Verdict | None = None
    ) -> Callable[[ControllerEvent], bool]:
        """An alert of this check, or of one whose name begins so, about that machine."""
        machine = self._job.machine(host).machine
        item = "" if gpu is None else self._fake.pci(gpu)

        def holds(event: ControllerEvent) -> bool:
            if not isinstance(event, AlertRaised) or event.machine != machine:
                return False
            result = event.alert.result
            right = verdict is None or result.verdict is verdict
            return right and result.check.startswith(check) and item in result.item

        return holds

    def _await(self, made: list[Watched]) -> None:
        """Until all of them were noticed, or patience is over."""
        deadline = time.monotonic() + PATIENCE_S
        found: dict[str, float] = {}
        while len(found) < len(made) and time.monotonic() < deadline:
            time.sleep(0.2)
            for record in self._job.records():
                for fault in made:
                    new = fault.key not in found and record.time >= fault.since
                    if new and fault.is_evidence(record.event):
                        found[fault.key] = record.time - fault.since
        for fault in made:
            self._seconds[fault.key].append(found.get(fault.key))


def _to_kernel_log(line: str) -> None:
    with Path("/dev/kmsg").open("w") as kmsg:
        kmsg.write(f"{line}\n")


def _detect(directory: Path, plan: Plan) -> dict[str, list[float | None]]:
    directory.mkdir()
    fake = FakeNvml(directory / "nvml", GPUS)
    everywhere = over(RAIL)
    with spread(directory, Size(nnodes=HOSTS, standbys=0), LEAVES) as job:
        bus = "/sys/bus/pci/devices"
        job.net.show(GPU_HOST, fake.machine() / bus[1:], bus)
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
