"""How much shared memory the checkpoints of one machine take, in numbers and in words. Pure.

slots.py computes it before it reserves anything, refuses with it, and prints it at the first save.
"""

from __future__ import annotations

from everstep.checkpoint.format import PAGE, padded
from everstep.model import Value

GIB = 1 << 30
ROTATING = 3
SLOTS = ROTATING + 1
"""Three that rotate and one that may be pinned."""
SLOTS_WITH_BACKUPS = ROTATING + 2
"""The machine-safe step, and the next one on its way to the peers."""
RECEIVED = 2
"""For each rank whose backups lie here: its machine-safe step, and the next one on its way."""
SPARE_BYTES = 64 << 10
"""Room in each slot beyond its first payload: pickled Python objects grow by a few bytes."""


def segment_bytes(payload_bytes: int) -> int:
    """Size of the file of one slot."""
    return padded(PAGE + payload_bytes + SPARE_BYTES, PAGE)


class Need(Value, frozen=True, kw_only=True):
    """What all ranks of a machine need, each as much as this one."""

    payload_bytes: int
    """Of one rank's state."""
    local_ranks: int
    backups: bool
    """Then the machine keeps as many backups of other ranks as it has ranks."""

    @property
    def slots(self) -> int:
        """Of one rank, with those for the backup that lies here in exchange for its own."""
        return SLOTS_WITH_BACKUPS + RECEIVED if self.backups else SLOTS

    @property
    def total_bytes(self) -> int:
        return segment_bytes(self.payload_bytes) * self.slots * self.local_ranks

    def __str__(self) -> str:
        kept = f"{ROTATING} that rotate and 1 on its way to disk"
        if self.backups:
            kept = f"{ROTATING} that rotate, 2 on their way to a peer, {RECEIVED} for a peer's"
        return (
            f"{self.total_bytes / GIB:.2f} GiB ({self.slots} slots x "
            f"{self.payload_bytes / GIB:.3f} GiB x {self.local_ranks} ranks on this machine; "
            f"{kept})"
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
