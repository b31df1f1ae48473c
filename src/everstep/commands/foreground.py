"""`everstep controller` and `everstep agent`: this process becomes a keeper, in the foreground.

For schedulers, service managers and people who want to see it run; `everstep run` starts the same
keepers detached.
"""

from __future__ import annotations

import os
import socket
import sys

from everstep.cluster.keepers import SETUP_NAME, command, start_keeper, write_machine
from everstep.commands import jobs
from everstep.commands.host import address_towards, slurm_units
from everstep.commands.run import machine_directory
from everstep.files import read_json
from everstep.model import EverstepError, UserError
from everstep.paths import Endpoint, JobPaths, MachineSetup
from everstep.processes import read_pid_file


def controller(job: JobPaths, *, resume: bool, detach: bool) -> None:
    """Bring a job's controller back under a keeper. Returns only if detached."""
    name = job.root.name
    result = jobs.result_of(job)
    if result is not None:
        raise UserError(f"Job {name} is over ({result.outcome}): there is nothing to control.")
    for what, pid_file in (("keeper", job.keeper_pid), ("controller", job.controller_pid)):
        process = read_pid_file(pid_file)
        if process is not None:
            raise UserError(
                f"Job {name} has a {what} already, process {process.pid}: it needs no other. End "
                "that one first if it should be replaced."
            )
    if job.journal.exists() and not resume:
        raise UserError(
            f"Job {name} has run before: say --resume to go on from its journal, or start a new "
            "job with `everstep run`."
        )
    setup = job.root / SETUP_NAME
    if not detach:
        os.execv(sys.executable, command(setup))
    if start_keeper(setup, job.keeper_log) is None:
        raise EverstepError(f"The keeper of the controller ended at once: see {job.keeper_log}.")
    sys.stdout.write(f"the controller of job {name} is back; `everstep status {name}` shows it\n")


def agent(job: JobPaths, *, node_rank: int | None, local_addr: str | None) -> None:
    """Join a job as one more machine. Does not return: this process becomes its keeper."""
    spec = jobs.spec_of(job)
    if jobs.result_of(job) is not None:
        raise UserError(f"Job {spec.job} is over: there is nothing to join.")
    endpoint = read_json(job.endpoint, Endpoint)
    host = endpoint.url.partition("://")[2].rpartition(":")[0].strip("[]")
    machine = machine_directory(job, node_rank)
    setup = MachineSetup(
        job=spec.job,
        uid=spec.uid,
        machine=machine,
        address=local_addr or address_towards(host),
        host=socket.gethostname(),
        job_dir=str(job.root),
        nproc_per_node=spec.nproc_per_node,
        node_rank=node_rank,
        units=slurm_units(os.environ),
    )
    os.execv(sys.executable, command(write_machine(job.machine(machine), setup)))
