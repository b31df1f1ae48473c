"""Where everything of one job lies: names only, no I/O. Every process computes the same ones.

    STATE/JOB/                     0700; STATE defaults to ~/.everstep/jobs
      spec.json                    JobSpec
      token                        0600; who knows it may speak to the controller
      endpoint.json                Endpoint: where the controller listens now, and its term
      result.json                  JobResult, written last
      journal/                     journal.py: records, index.sqlite, snapshot, term-N
      code/VERSION/                code/store.py: the code versions that the controller gives out
      controller.log  keeper.log
      machines/M/
        machine.json               MachineSetup: what this machine is
        keeper.pid  agent.pid  launcher.pid     "PID START_TICKS" of the live process
        exits                      one line per reaped process: "PID START_TICKS STATUS"
        launcher.sock  notice.sock agent -> launcher; rank -> agent
        agent.log  launcher.log  keeper.log
        code/VERSION/              code versions that this machine may have to run
        ranks/G/rank-R.log         output of rank R in generation G
        ranks/G/rank-R.error.json  torch's error file
    /dev/shm/everstep-JOB-UID-M/   shared memory of one machine
      heartbeat                    one 128-byte slot per local rank
      groups-L  recorder-L[.sock]  of local rank L: its process groups, and where torch's server
                                   gives its flight record
      stacks-L                     where it writes its stacks when asked to, mostly empty
      rank-R/                      checkpoint slots of rank R, and its control words
      backup/rank-R/               slots with the backups of rank R of another machine
    LOCAL/everstep-JOB-UID/        the machine's own disk, if --local-checkpoint-dir says where
      step-N/rank-R.shard          a copy of rank R's slot of step N

Unix socket paths are limited to 107 bytes; the sockets therefore have a short path of their own
under `socket_dir` when the state directory is deep (see MachinePaths.launcher_socket).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from everstep.model import Generation, JobId, JobSpec, MachineId, Rank, Value

SOCKET_PATH_MAX = 107
"""Bytes of sun_path on Linux without its closing zero (unix(7))."""
SHM_ROOT = Path("/dev/shm")  # noqa: S108 -- tmpfs is the point


class Endpoint(Value, frozen=True, kw_only=True):
    """Content of endpoint.json."""

    url: str
    """http://HOST:PORT, no trailing slash."""
    term: int
    pid: int


class MachineSetup(Value, frozen=True, kw_only=True):
    """Content of machine.json: what the keeper's children need to know about their machine."""

    job: JobId
    uid: str
    machine: MachineId
    address: str
    host: str
    job_dir: str
    """Absolute path of STATE/JOB as this machine sees it."""
    nproc_per_node: int
    endpoint_url: str | None = None
    """None: read endpoint.json of the job directory at every connection attempt."""
    node_rank: int | None = None
    units: tuple[str, ...] = ()
    """As in MachineJoined."""
    env: dict[str, str] = {}
    """Added to the environment of every rank here (for stand-ins: GLOO_SOCKET_IFNAME)."""


class JobResult(Value, frozen=True, kw_only=True):
    """Content of result.json."""

    outcome: str
    exit_code: int
    why: str
    detail: str = ""


class JobPaths:
    """Paths of one job below the state directory."""

    def __init__(self, root: Path, job: JobId) -> None:
        self.root = root / job
        self.spec = self.root / "spec.json"
        self.token = self.root / "token"
        self.endpoint = self.root / "endpoint.json"
        self.result = self.root / "result.json"
        self.journal = self.root / "journal"
        self.controller_log = self.root / "controller.log"
        self.controller_pid = self.root / "controller.pid"
        self.keeper_log = self.root / "keeper.log"
        self.keeper_pid = self.root / "keeper.pid"
        self.machines = self.root / "machines"
        self.code = self.root / "code"

    def machine(self, machine: MachineId) -> MachinePaths:
        return MachinePaths(self.machines / machine)


class MachinePaths:
    """Paths of one machine below its job's directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.setup = root / "machine.json"
        self.exits = root / "exits"
        self.ranks = root / "ranks"
        self.code = root / "code"
        self.launcher_socket = socket_path(root, "launcher.sock")
        self.notice_socket = socket_path(root, "notice.sock")

    def pid_file(self, service: str) -> Path:
        """Of "keeper", "agent" or "launcher"."""
        return self.root / f"{service}.pid"

    def log(self, service: str) -> Path:
        return self.root / f"{service}.log"

    def rank_log(self, generation: Generation, rank: Rank) -> Path:
        return self.ranks / str(generation) / f"rank-{rank}.log"

    def error_file(self, generation: Generation, rank: Rank) -> Path:
        return self.ranks / str(generation) / f"rank-{rank}.error.json"


def socket_path(directory: Path, name: str) -> Path:
    """`directory`/`name`, or a short stand-in below /tmp where that would not fit into sun_path."""
    path = directory / name
    if len(bytes(path)) <= SOCKET_PATH_MAX:
        return path
    digest = hashlib.sha256(bytes(directory)).hexdigest()[:16]
    return Path("/tmp") / f"everstep-{digest}-{name}"  # noqa: S108 -- only /tmp is short


def shm_dir(job: JobId, uid: str, machine: MachineId) -> Path:
    """Directory of all shared memory of one machine of one job."""
    return SHM_ROOT / f"everstep-{job}-{uid}-{machine}"


def local_disk_dir(directory: str, spec: JobSpec, machine: MachineId) -> Path:
    """Where one machine of one job keeps shards below --local-checkpoint-dir.

    A host that comes back after a reboot has a new name as a machine and finds what it wrote
    before; stand-ins share a host and must not share this.
    """
    name = f"everstep-{spec.job}-{spec.uid}"
    return Path(directory) / (f"{name}-{machine}" if spec.local else name)


def rank_shm(shm: Path, rank: Rank) -> Path:
    """Directory of one rank's checkpoint slots inside its machine's shared memory."""
    return shm / f"rank-{rank}"


def kept_shm(shm: Path) -> Path:
    """Directory of what a machine keeps for ranks of other machines."""
    return shm / "backup"
