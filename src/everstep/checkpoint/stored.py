"""What people ask about the disk tier: which steps are there, and are they whole.

`everstep checkpoint` calls it. Reads only, without torch: a step that is whole here can be restored
by the job that wrote it.
"""

from __future__ import annotations

from pathlib import Path

from everstep.checkpoint import disk
from everstep.checkpoint.format import Expected, ShardBad
from everstep.checkpoint.slots import ShardMissing
from everstep.model import EverstepError, Generation, Rank, Step, Value


class StoredStep(Value, frozen=True, kw_only=True):
    """A published step."""

    step: Step
    generation: Generation
    """The one that computed it."""
    world_size: int
    disk_bytes: int
    """Of all its files."""
    published_at_s: float
    """Unix time."""


class CheckedStep(Value, frozen=True, kw_only=True):
    """What verify() found."""

    step: Step
    world_size: int
    problems: tuple[str, ...]
    """A sentence for each shard that is missing or damaged; empty: the step is whole."""


class NoSuchStep(EverstepError):
    """The step is not published."""

    exit_code = 2


def stored(directory: Path) -> list[StoredStep]:
    """All published steps, oldest first."""
    return [_describe(directory, item.step) for item in disk.published(directory)]


def newest(directory: Path) -> Step:
    """Raises NoSuchStep if there is none."""
    steps = [item.step for item in disk.published(directory)]
    if not steps:
        raise NoSuchStep(f"there is no published step in {directory}")
    return steps[-1]


def find(directory: Path, step: Step) -> StoredStep:
    """Raises NoSuchStep, which names those that are there."""
    try:
        return _describe(directory, step)
    except ShardMissing as error:
        there = ", ".join(str(item.step) for item in disk.published(directory)) or "none"
        raise NoSuchStep(f"{error}; published are: {there}") from error


def verify(directory: Path, step: Step) -> CheckedStep:
    """Read every shard of a published step and compare its checksum."""
    world_size = find(directory, step).world_size
    problems = []
    for rank in range(world_size):
        try:
            disk.read(directory, Expected(step=step, rank=Rank(rank))).verify()
        except (ShardMissing, ShardBad) as error:
            problems.append(str(error))
    return CheckedStep(step=step, world_size=world_size, problems=tuple(problems))


def _describe(directory: Path, step: Step) -> StoredStep:
    manifest = disk.manifest_of(directory, step)
    place = disk.step_dir(directory, step)
    files = [path.stat() for path in place.iterdir()]
    return StoredStep(
        step=step,
        generation=manifest.generation,
        world_size=manifest.world_size,
        disk_bytes=sum(file.st_size for file in files),
        published_at_s=(place / disk.MANIFEST).stat().st_mtime,
    )
