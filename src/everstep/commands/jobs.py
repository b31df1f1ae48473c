"""The jobs of a state directory: which there are, which run, and which one a command means.

A command that names no job means the only one that runs, or the newest. Reads files and looks at
processes; changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from everstep.files import FileUnreadable, read_json
from everstep.model import JobId, JobSpec, UserError
from everstep.paths import JobPaths, JobResult
from everstep.processes import read_pid_file

TOKEN_VARIABLE = "EVERSTEP_TOKEN"  # noqa: S105 -- its name, not a token
HOME_VARIABLE = "EVERSTEP_HOME"
"""Environment variable that names the state directory."""


class NoSuchJob(UserError):
    """The job that a command names, or any job, is not there."""


def state_dir(flag: str | None, environ: Mapping[str, str]) -> Path:
    """The directory of all jobs, absolute: the flag, else $EVERSTEP_HOME, else ~/.everstep/jobs."""
    chosen = flag or environ.get(HOME_VARIABLE) or "~/.everstep/jobs"
    return Path(os.path.abspath(Path(chosen).expanduser()))


def all_jobs(state: Path) -> list[JobPaths]:
    """Every job of the state directory, oldest first."""
    if not state.is_dir():
        return []
    found = [JobPaths(state, JobId(entry.name)) for entry in state.iterdir()]
    return sorted((job for job in found if job.spec.is_file()), key=_submitted_at)


def runs_here(job: JobPaths) -> bool:
    """Whether any keeper of the job, of its controller or of a machine, is alive on this host."""
    machines = job.machines.iterdir() if job.machines.is_dir() else ()
    pid_files = [job.keeper_pid, *(machine / "keeper.pid" for machine in machines)]
    return any(read_pid_file(path) for path in pid_files)


def find(state: Path, name: str | None) -> JobPaths:
    """The job of this name; without a name the newest that runs here, else the newest."""
    jobs = all_jobs(state)
    if name is not None:
        for job in jobs:
            if job.root.name == name:
                return job
        raise NoSuchJob(f"There is no job {name} in {state}{_instead(jobs)}.")
    if not jobs:
        raise NoSuchJob(f"There is no job in {state}: start one with `everstep run SCRIPT`.")
    return next((job for job in reversed(jobs) if runs_here(job)), jobs[-1])


def spec_of(job: JobPaths) -> JobSpec:
    return read_json(job.spec, JobSpec)


def result_of(job: JobPaths) -> JobResult | None:
    """How the job ended; None while it has not, or if nobody could write it down."""
    try:
        return read_json(job.result, JobResult)
    except FileUnreadable:
        return None


def _submitted_at(job: JobPaths) -> float:
    return job.spec.stat().st_mtime


def _instead(jobs: list[JobPaths]) -> str:
    if not jobs:
        return ", nor any other"
    newest = ", ".join(job.root.name for job in jobs[-5:])
    return f"; there is {newest}"
