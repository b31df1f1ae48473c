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
from everstep.processes import command_line, descendants, everyone, read_pid_file


class Cleaning(Value, frozen=True, kw_only=True):
    """How to clean."""

    forget: bool
    """Remove the job's directory too: its journal, logs and default checkpoints."""
    dry_run: bool


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


def clean_all(found: list[JobPaths], what: Cleaning, *, json: bool) -> None:
    """Clean every job but those that a living controller looks after."""
    living = [job for job in found if read_pid_file(job.controller_pid)]
    for job in living:
        name = job.root.name
        sys.stderr.write(f"everstep: job {name} runs and is left alone; name it to end it\n")
    clean([job for job in found if job not in living], what, json=json)


def clean(found: list[JobPaths], what: Cleaning, *, json: bool) -> None:
    """End every process of these jobs, remove their shared memory and sockets."""
    cleaned = [_planned(job, what) if what.dry_run else _clean(job, what) for job in found]
    if json:
        print_json(cleaned)
        return
    if not cleaned:
        sys.stdout.write("there is no job to clean\n")
    for job in cleaned:
        sys.stdout.write("\n".join(_lines(job)) + "\n")


def _clean(job: JobPaths, what: Cleaning) -> CleanedJob:
    cleaned = clean_job(job.root)
    if what.forget:
        shutil.rmtree(job.root)
    return CleanedJob(
        job=JobId(job.root.name),
        dry_run=False,
        processes=cleaned.processes,
        directories=(*cleaned.directories, *_forgotten(job, what)),
        files=cleaned.files,
    )


def _planned(job: JobPaths, what: Cleaning) -> CleanedJob:
    scope = job_scope(job.root, jobs.spec_of(job))
    members = [process for process in everyone() if belongs(process, scope)]
    below = [process for process in descendants(members) if process not in members]
    lines = (f"{pid} {' '.join(command_line(pid))}" for pid, _ in (*members, *below))
    return CleanedJob(
        job=JobId(job.root.name),
        dry_run=True,
        processes=tuple(lines),
        directories=(*scope.shm, *scope.local_disk, *_forgotten(job, what)),
    )


def _forgotten(job: JobPaths, what: Cleaning) -> tuple[str, ...]:
    return (str(job.root),) if what.forget else ()


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
