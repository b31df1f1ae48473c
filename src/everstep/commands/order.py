"""`everstep stop`, `inject` and `clean`: what changes a job from outside."""

from __future__ import annotations

import shutil
import sys

from everstep.cluster.cleanup import belongs, clean_job, job_scope
from everstep.commands import jobs
from everstep.commands.client import Client
from everstep.commands.show import print_json
from everstep.model import Fault, JobId, UserError, Value
from everstep.paths import JobPaths
from everstep.processes import command_line, descendants, everyone


class CleanedJob(Value, frozen=True, kw_only=True):
    """What `clean --json` prints for each job."""

    job: JobId
    dry_run: bool
    processes: tuple[str, ...]
    """ "PID command line" of each."""
    directories: tuple[str, ...]
    """Of shared memory; the job's own too if it is to be forgotten."""
    files: tuple[str, ...] = ()


def stop(job: JobPaths, *, json: bool) -> None:
    """Ask for the end of the job; returns when the controller has noted it."""
    name = job.root.name
    result = jobs.result_of(job)
    if result is not None:
        raise UserError(f"Job {name} is over already ({result.outcome}: {result.why}).")
    with Client(job) as client:
        client.stop("everstep stop")
    _done(f"job {name} is stopping; `everstep attach {name}` shows its end", json=json)


def inject(
    job: JobPaths, fault: Fault, *, rank: int | None, machine: str | None, json: bool
) -> None:
    """Break something of a running job on purpose."""
    with Client(job) as client:
        client.inject(fault, rank, machine)
    name = job.root.name
    _done(f"{fault} is ordered; `everstep incidents {name}` shows what comes of it", json=json)


def clean(found: list[JobPaths], *, forget: bool, dry_run: bool, json: bool) -> None:
    """End every process of these jobs, remove their shared memory and sockets."""
    cleaned = [_planned(job, forget) if dry_run else _clean(job, forget) for job in found]
    if json:
        print_json(cleaned)
        return
    if not cleaned:
        sys.stdout.write("there is no job to clean\n")
    for job in cleaned:
        sys.stdout.write("\n".join(_lines(job)) + "\n")


def _clean(job: JobPaths, forget: bool) -> CleanedJob:  # noqa: FBT001 -- a flag of the user
    cleaned = clean_job(job.root)
    if forget:
        shutil.rmtree(job.root)
    return CleanedJob(
        job=JobId(job.root.name),
        dry_run=False,
        processes=cleaned.processes,
        directories=(*cleaned.directories, *_forgotten(job, forget)),
        files=cleaned.files,
    )


def _planned(job: JobPaths, forget: bool) -> CleanedJob:  # noqa: FBT001 -- a flag of the user
    scope = job_scope(job.root, jobs.spec_of(job))
    members = [process for process in everyone() if belongs(process, scope)]
    below = [process for process in descendants(members) if process not in members]
    lines = (f"{pid} {' '.join(command_line(pid))}" for pid, _ in (*members, *below))
    return CleanedJob(
        job=JobId(job.root.name),
        dry_run=True,
        processes=tuple(lines),
        directories=(*scope.shm, *_forgotten(job, forget)),
    )


def _forgotten(job: JobPaths, forget: bool) -> tuple[str, ...]:  # noqa: FBT001 -- the same
    return (str(job.root),) if forget else ()


def _lines(cleaned: CleanedJob) -> list[str]:
    verbs = ("would end", "would remove") if cleaned.dry_run else ("ended", "removed")
    lines = [f"job {cleaned.job}: {verbs[0]} process {line}" for line in cleaned.processes]
    lines += [f"job {cleaned.job}: {verbs[1]} {path}" for path in cleaned.directories]
    lines += [f"job {cleaned.job}: {verbs[1]} {path}" for path in cleaned.files]
    return lines or [f"job {cleaned.job}: nothing was left"]


def _done(sentence: str, *, json: bool) -> None:
    if json:
        print_json({"accepted": True})
    else:
        sys.stdout.write(sentence + "\n")
