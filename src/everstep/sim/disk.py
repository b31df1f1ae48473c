"""The shared checkpoint directory and machines' own disks, as disk.py and local_disk.py in
checkpoint/ treat them, without the bytes.
"""

from __future__ import annotations

from collections.abc import Collection

from everstep.model import Copy, Generation, Published, Rank, Step


class Disk:
    """Shards that agents persist and steps that the controller publishes."""

    def __init__(self, world_size: int, keep: int) -> None:
        self.full = False
        self._world_size = world_size
        self._keep = keep
        self._shards: dict[Step, dict[Rank, Generation]] = {}
        self._manifests: dict[Step, Generation] = {}

    def persist(self, rank: Rank, step: Step, generation: Generation) -> str:
        """Put one shard there; returns why it could not be done, empty if it is done."""
        if self.full:
            return "No space left on device"
        if self._manifests.get(step, generation) != generation:
            del self._manifests[step]  # computed anew: the former one must not lie meanwhile
        self._shards.setdefault(step, {})[rank] = generation
        return ""

    def publish(self, step: Step, generation: Generation, world_size: int | None = None) -> str:
        """Declare the step complete; returns why it is not, empty if it is.

        `world_size`: of the ranks that computed it, if the job has another size now.
        """
        there = self._shards.get(step, {})
        for rank in map(Rank, range(world_size or self._world_size)):
            if there.get(rank) != generation:
                return f"the shard of rank {rank} of step {step} is missing or another one"
        if self.full:
            return "No space left on device"
        self._manifests[step] = generation
        complete = sorted(self._manifests)
        for old in sorted(self._shards):
            if old < complete[-1] and old not in complete[-self._keep :]:
                del self._shards[old]
                self._manifests.pop(old, None)
        return ""

    def published(self) -> list[Published]:
        """Complete steps, oldest first."""
        found = sorted(self._manifests.items())
        return [Published(step=step, generation=generation) for step, generation in found]


class LocalDisk:
    """One machine's own: it outlives the machine's memory, and nothing else of the machine does."""

    def __init__(self) -> None:
        self.copies: tuple[Copy, ...] = ()

    def put(self, copy: Copy) -> None:
        """A shard is complete there, in place of what the rank had of this step."""
        others = [c for c in self.copies if (c.rank, c.step) != (copy.rank, copy.step)]
        self.copies = (*others, copy)

    def keep(self, steps: Collection[Step]) -> None:
        self.copies = tuple(copy for copy in self.copies if copy.step in steps)

    def drop_newer(self, step: Step) -> None:
        """What the next generation does not restore is void."""
        self.copies = tuple(copy for copy in self.copies if copy.step <= step)
