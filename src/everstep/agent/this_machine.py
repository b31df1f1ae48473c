"""What the processes of one machine know about it from the start: its setup and its job.

Read once by the agent's shell and by the launcher. Nothing in it changes while they live.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from everstep.actions import StartRanks
from everstep.files import read_json
from everstep.model import JobId, JobSpec, NodeRank, Rank
from everstep.paths import Endpoint, JobPaths, MachinePaths, MachineSetup, local_disk_dir, shm_dir


class ThisMachine(NamedTuple):
    """Setup, job and places of the machine that this process runs on."""

    setup: MachineSetup
    spec: JobSpec
    job: JobPaths
    paths: MachinePaths
    shm: Path

    @classmethod
    def read(cls, machine_json: Path) -> ThisMachine:
        """FileUnreadable if one of the two files is not what it should be."""
        setup = read_json(machine_json, MachineSetup)
        job_dir = Path(setup.job_dir)
        job = JobPaths(job_dir.parent, JobId(job_dir.name))
        return cls(
            setup=setup,
            spec=read_json(job.spec, JobSpec),
            job=job,
            paths=MachinePaths(machine_json.parent),
            shm=shm_dir(setup.job, setup.uid, setup.machine),
        )

    def controller_url(self) -> str:
        """Where the controller listens now. FileUnreadable if that is not to be found out."""
        if self.setup.endpoint_url is not None:
            return self.setup.endpoint_url
        return read_json(self.job.endpoint, Endpoint).url

    @property
    def local_disk(self) -> Path | None:
        """Where its ranks' shards lie on its own disk; None: nowhere."""
        directory = self.spec.checkpoint.local_directory
        return local_disk_dir(directory, self.spec, self.setup.machine) if directory else None

    @property
    def heartbeat(self) -> Path:
        """File of the heartbeat slots, one for each local rank."""
        return self.shm / "heartbeat"

    def job_of(self, order: StartRanks) -> JobSpec:
        """The job as it is in the order's generation: maybe with fewer machines."""
        return self.spec.resized(order.nnodes, order.dp) if order.nnodes else self.spec

    def savers_of(self, order: StartRanks) -> int:
        """How many ranks there were when the step was saved that the order restores."""
        nnodes = order.restore_nnodes or self.job_of(order).nnodes
        return nnodes * self.spec.nproc_per_node

    def ranks_of(self, node_rank: NodeRank) -> list[Rank]:
        """The ranks here, in local-rank order, while the machine has this position."""
        return [Rank(rank) for rank in self.spec.ranks_of(node_rank)]
