"""What an agent leaves for its successor: a small file in shared memory, replaced as a whole.

The heartbeat slots say which processes are ranks; this says the rest: what was ordered, and what
the controller knows already. In shared memory, because it is worth nothing without the machine and
must cost no disk access in the middle of a restart.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from everstep.agent.checks.memory import KeptChild
from everstep.model import NO_GENERATION, NO_VERSION, Generation, NodeRank, Rank, Term, VersionId


class Memory(msgspec.Struct, kw_only=True):
    """Content of the file."""

    term: Term = Term(0)
    """Highest heard of: a fenced controller must not be listened to after a restart either."""
    generation: Generation = NO_GENERATION
    """Newest that was ordered."""
    node_rank: NodeRank | None = None
    """Position at the newest start of ranks."""
    world_size: int = 0
    """All machines' ranks at the newest start; 0 before that."""
    version: VersionId = NO_VERSION
    """Code version at the newest start of ranks: what they import late must not be removed."""
    told: list[Rank] = []
    """Ranks of `generation` whose end the controller has acknowledged."""
    store_port: int = 0
    """Port held for rank 0's store of `generation`."""
    shard_port: int = 0
    """Where the shard server listened: peers that were told of it try it again."""
    idle_gpus: dict[str, float] = {}
    """Mebibytes in use of each GPU, by PCI address, before ranks started here."""
    gpus_child: KeptChild | None = None
    """The process that asks the driver who uses them, if there is one."""
    shown: dict[Rank, int] = {}
    """Bytes of each rank's log of `generation` that were sent to the controller."""


class MemoryFile:
    """The file. Reading and writing never fail: a lost memory costs repetition, not safety."""

    def __init__(self, shm: Path) -> None:
        self._path = shm / "agent"
        self._written = b""

    @property
    def there(self) -> bool:
        """Whether there was an agent here since the host booted."""
        return self._path.exists()

    def read(self) -> Memory:
        """What the predecessor left, or a blank one."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Memory)
        except (OSError, msgspec.MsgspecError):
            return Memory()

    def write(self, memory: Memory) -> None:
        """Replace the file if anything changed."""
        content = msgspec.json.encode(memory)
        if content == self._written:
            return
        beside = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            beside.write_bytes(content)
            beside.replace(self._path)
        except OSError:
            return
        self._written = content
