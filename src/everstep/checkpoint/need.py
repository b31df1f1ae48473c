"""How much shared memory the checkpoints of one machine take, in numbers and in words. Pure.

slots.py computes it before it reserves anything, refuses with it, and prints it at the first save.
"""

from __future__ import annotations

from everstep.checkpoint.format import PAGE, padded
from everstep.model import Value

ROTATING = 3
SLOTS = ROTATING + 1
"""Three that rotate and one that may be pinned."""
SLOTS_WITH_BACKUPS = ROTATING + 2
"""The machine-safe step, and the next one on its way to the peers."""
RECEIVED = 2
"""For each rank whose backups lie here: its machine-safe step, and the next one on its way."""
SPARE_BYTES = 64 << 10
"""Room in each slot beyond its first payload: pickled Python objects grow by a few bytes."""


def in_words(size: float) -> str:
    """For people: 1536 is "1.5 KiB"."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while size >= 1000 and power < len(units) - 1:
        size, power = size / 1024, power + 1
    return f"{size:.3g} {units[power]}" if size < 1000 else f"{size:.0f} {units[power]}"


def segment_bytes(payload_bytes: int) -> int:
    """Size of the file of one slot."""
    return padded(PAGE + payload_bytes + SPARE_BYTES, PAGE)


class Need(Value, frozen=True, kw_only=True):
    """What all ranks of a machine need, each as much as this one."""

    payload_bytes: int
    """Of one rank's state."""
    backup_bytes: int
    """What a peer keeps of it: less, where other ranks hold the same."""
    local_ranks: int
    backups: bool
    """Then the machine keeps as many backups of other ranks as it has ranks."""

    @property
    def slots(self) -> int:
        """Of one rank, for its own state."""
        return SLOTS_WITH_BACKUPS if self.backups else SLOTS

    @property
    def total_bytes(self) -> int:
        """With what lies here for a peer in exchange for the own backup there."""
        kept = RECEIVED * segment_bytes(self.backup_bytes) if self.backups else 0
        return (segment_bytes(self.payload_bytes) * self.slots + kept) * self.local_ranks

    def __str__(self) -> str:
        size = in_words(self.payload_bytes)
        kept = f"{ROTATING} that rotate and 1 on its way to disk"
        if self.backups:
            kept = (
                f"{ROTATING} that rotate, 2 on their way to a peer; and {RECEIVED} x "
                f"{in_words(self.backup_bytes)} for a peer's"
            )
        return (
            f"{in_words(self.total_bytes)} (for each of {self.local_ranks} ranks on this machine "
            f"{self.slots} slots x {size}: {kept})"
        )

    def unpinned(self, locked_bytes: int | None) -> str:
        """A clause on what a rank cannot pin for its GPU under this limit; empty if it can all.

        `locked_bytes`: what one process may lock, None for any amount.
        """
        wanted = segment_bytes(self.payload_bytes) * self.slots
        if locked_bytes is None or locked_bytes >= wanted:
            return ""
        return (
            f"; each rank pins {in_words(wanted)} of it for copies from its GPU, but may lock"
            f" {in_words(locked_bytes)}, and copies are slower where the driver minds that: raise"
            " the limit (ulimit -l, docker run --ulimit memlock=-1, LimitMEMLOCK=infinity)"
        )

    @property
    def advice(self) -> str:
        """What to do where there is less."""
        less = (
            "keep no copies in the memory of peers (--no-backup), or save less per rank (shard "
            "the state with FSDP, fewer ranks per machine)"
            if self.backups
            else "save less per rank (shard the state with FSDP, fewer ranks per machine)"
        )
        return (
            "enlarge it (docker run --shm-size, Kubernetes emptyDir with medium Memory, a higher "
            f"memory limit), or {less}"
        )
