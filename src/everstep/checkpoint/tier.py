"""Where published steps lie: a directory on a file system, or anything that fsspec reaches.

The agent persists shards, the controller publishes steps and ranks read them through this, so none
of them knows which it is. A path and file:// mean disk.py; any other URL (s3://, hdfs://, gs://)
means remote.py, which needs `everstep[remote]` and the store's own package. No torch here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from everstep.checkpoint import disk
from everstep.checkpoint.disk import Manifest
from everstep.checkpoint.format import Expected, Shard
from everstep.model import EverstepError, Published, Rank, Step

FILE = "file://"


class TierFailed(EverstepError):
    """The store does not do what was asked of it; the message says what and why."""


class Tier(Protocol):
    """Whole steps outside of memory. What a step needs to be there, disk.py says."""

    def persist(self, shm: Path, rank: Rank, step: Step) -> None:
        """Copy the rank's shard of this step there.

        Raises ShardMissing (not saved yet), ShardLost (overwritten, also while it was copied),
        OSError, TierFailed.
        """

    def publish(self, published: Published, world_size: int, keep: int) -> None:
        """Declare a step complete, then remove those beyond `keep` and older leftovers.

        Raises ShardMissing or ShardBad if a rank's shard is not there or is another one, OSError,
        TierFailed.
        """

    def published(self) -> list[Published]:
        """Complete steps, oldest first. Raises TierFailed if that cannot be found out."""

    def manifest(self, step: Step) -> Manifest:
        """What a published step says about itself. Raises ShardMissing, TierFailed."""

    def withdraw(self, step: Step) -> None:
        """Take a publication back: a shard of it turned out to be bad."""

    def read(self, expected: Expected) -> Shard:
        """Open a rank's shard of a published step. Raises ShardMissing, ShardBad, TierFailed."""


class DirectoryTier:
    """A directory on a file system that all machines share."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def persist(self, shm: Path, rank: Rank, step: Step) -> None:
        disk.persist(shm, rank, step, self._directory)

    def publish(self, published: Published, world_size: int, keep: int) -> None:
        step, generation = published.step, published.generation
        disk.publish(self._directory, step, generation, world_size=world_size, keep=keep)

    def published(self) -> list[Published]:
        return disk.published(self._directory)

    def manifest(self, step: Step) -> Manifest:
        return disk.manifest_of(self._directory, step)

    def withdraw(self, step: Step) -> None:
        disk.withdraw(self._directory, step)

    def read(self, expected: Expected) -> Shard:
        return disk.read(self._directory, expected)


def is_url(directory: str) -> bool:
    """Whether this is a place for fsspec, and no path."""
    return "://" in directory and not directory.startswith(FILE)


def tier_at(directory: str) -> Tier:
    """The tier of a checkpoint directory, as --checkpoint-dir has it.

    Raises TierFailed if the store's package is not installed, or does not take the URL.
    """
    if not is_url(directory):
        return DirectoryTier(Path(directory.removeprefix(FILE)))
    try:
        from everstep.checkpoint.remote import RemoteTier  # noqa: PLC0415 -- an extra
    except ImportError as error:
        raise TierFailed(
            f"checkpoints in {directory} need fsspec: install everstep[remote] ({error})"
        ) from error
    return RemoteTier(directory)
