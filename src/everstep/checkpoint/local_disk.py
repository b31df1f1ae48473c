"""A machine's own disk: its ranks' shards of a few steps, for the time when no memory is left.

    DIRECTORY/step-N/rank-R.shard     as in disk.py, but always whole: no other machine is needed

There is no manifest. Whether a step is whole, on the disks of all machines together, the controller
finds from what the agents list; a shard that is listed here may still turn out to be damaged. The
agent of the machine writes, lists and removes, the ranks read. No torch here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from everstep.checkpoint import disk, slots
from everstep.checkpoint.format import Expected, Shard
from everstep.model import Copy, Rank, Step


def persist(shm: Path, rank: Rank, step: Step, directory: Path, go_on: Callable[[], None]) -> None:
    """Copy the rank's shard of this step there, checked and fsynced. Raises as disk.persist().

    `go_on` is called before every chunk, and may raise to end it.
    """
    shard = slots.find(shm, Expected(step=step, rank=rank))
    disk.copy_shard(shm, shard, directory, [shard.payload], go_on)


def inventory(directory: Path) -> list[Copy]:
    """All complete shards, by step and rank. Payloads are not read. Raises OSError."""
    found = []
    for step in disk.steps_in(directory):
        for path in sorted(disk.step_dir(directory, step).glob("rank-*.shard")):
            header = disk.header_of(path)
            if header is not None and path == disk.shard_path(directory, step, header.rank):
                found.append(Copy(rank=header.rank, step=step, generation=header.generation))
    return found


def keep(directory: Path, steps: Collection[Step]) -> None:
    """Remove all other steps, finished or not."""
    for step in disk.steps_in(directory):
        if step not in steps:
            shutil.rmtree(disk.step_dir(directory, step), ignore_errors=True)


def drop_newer(directory: Path, step: Step) -> None:
    """Remove what the next generation does not restore."""
    keep(directory, [held for held in disk.steps_in(directory) if held <= step])


def read(directory: Path, expected: Expected) -> Shard:
    """Open the rank's shard. Raises ShardMissing or ShardBad."""
    return disk.open_file(directory, expected)


def drop(directory: Path, rank: Rank, step: Step) -> None:
    """Remove a shard that turned out to be bad. Raises OSError."""
    disk.shard_path(directory, step, rank).unlink(missing_ok=True)


def remove_all(directory: Path) -> None:
    """At the end of the job, or when the machine leaves it."""
    shutil.rmtree(directory, ignore_errors=True)
