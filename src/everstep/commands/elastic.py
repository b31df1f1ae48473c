"""What --elastic-dp asks for, and whether a job can have it. Used by plan.py."""

from __future__ import annotations

from everstep.checkpoint.tier import is_url
from everstep.commands.flags import RunFlags
from everstep.core.sizes import largest
from everstep.model import ElasticSpec, JobSpec, UserError


def read_elastic(flags: RunFlags) -> ElasticSpec | None:
    """Raises UserError for a number that is none, or half of the two flags."""
    if flags.elastic_dp is None:
        if flags.elastic_sharded:
            raise UserError("--elastic-sharded says how, and --elastic-dp MIN is missing: give it.")
        return None
    if flags.elastic_dp < 1:
        raise UserError(f"--elastic-dp {flags.elastic_dp}: a job needs at least 1 replica.")
    return ElasticSpec(dp_min=flags.elastic_dp, sharded=flags.elastic_sharded)


def check_elastic(job: JobSpec) -> None:
    """Raises UserError if there is no smaller size that the job could go on with."""
    elastic = job.elastic
    if elastic is None:
        return
    flag = f"--elastic-dp {elastic.dp_min}"
    if job.layout is not None and job.layout.ep > 1:
        raise UserError(
            f"{flag}: with ep={job.layout.ep} experts are spread over the replicas, so none of them"
            " can be missed."
        )
    if elastic.dp_min >= job.dp:
        raise UserError(
            f"{flag}: the job has {job.dp} data-parallel replicas, so there is no smaller number to"
            " go on with. --layout says how many there are; without it every rank is one."
        )
    if largest(job, job.nnodes - 1) is None:
        raise UserError(
            f"{flag}: {elastic.dp_min} to {job.dp - 1} of {job.dp} replicas of"
            f" {job.world_size // job.dp} ranks never fill fewer than {job.nnodes} machines of"
            f" {job.nproc_per_node} ranks."
        )
    if elastic.sharded:
        _check_sharded(job, flag)


def _check_sharded(job: JobSpec, flag: str) -> None:
    if is_url(job.checkpoint.directory):
        raise UserError(
            f"{flag} --elastic-sharded needs a --checkpoint-dir on a file system that all machines"
            f" share, not {job.checkpoint.directory}."
        )
    if job.checkpoint.disk_every.never:
        raise UserError(
            f"{flag} --elastic-sharded loads the newest step from disk, and --disk-every 0 puts"
            " none there."
        )
