"""What people ask about steps on disk or in a store: which steps are there, and are they whole.

`everstep checkpoint` calls it. Reads only, without torch: a step that is whole here can be restored
by the job that wrote it.
"""

from __future__ import annotations

from everstep.checkpoint.format import Expected, ShardBad
from everstep.checkpoint.slots import ShardMissing
from everstep.checkpoint.tier import Tier
from everstep.model import EverstepError, Generation, Rank, Step, Value


class StoredStep(Value, frozen=True, kw_only=True):
    """A published step."""

    step: Step
    generation: Generation
    """The one that computed it."""
    world_size: int
    stored_bytes: int
    """What all ranks wrote."""


class CheckedStep(Value, frozen=True, kw_only=True):
    """What verify() found."""

    step: Step
    world_size: int
    problems: tuple[str, ...]
    """A sentence for each shard that is missing or damaged; empty: the step is whole."""


class NoSuchStep(EverstepError):
    """The step is not published."""

    exit_code = 2


def stored(tier: Tier) -> list[StoredStep]:
    """All published steps, oldest first."""
    return [_describe(tier, item.step) for item in tier.published()]


def newest(tier: Tier) -> Step:
    """Raises NoSuchStep if there is none."""
    steps = tier.published()
    if not steps:
        raise NoSuchStep("there is no published step")
    return steps[-1].step


def find(tier: Tier, step: Step) -> StoredStep:
    """Raises NoSuchStep, which names those that are there."""
    try:
        return _describe(tier, step)
    except ShardMissing as error:
        there = ", ".join(str(item.step) for item in tier.published()) or "none"
        raise NoSuchStep(f"{error}; published are: {there}") from error


def verify(tier: Tier, step: Step) -> CheckedStep:
    """Read every shard of a published step and compare its checksum."""
    world_size = find(tier, step).world_size
    problems = []
    for rank in range(world_size):
        try:
            tier.read(Expected(step=step, rank=Rank(rank))).verify()
        except (ShardMissing, ShardBad) as error:
            problems.append(str(error))
    return CheckedStep(step=step, world_size=world_size, problems=tuple(problems))


def _describe(tier: Tier, step: Step) -> StoredStep:
    manifest = tier.manifest(step)
    return StoredStep(
        step=step,
        generation=manifest.generation,
        world_size=manifest.world_size,
        stored_bytes=sum(manifest.payload_bytes),
    )
