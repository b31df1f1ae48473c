"""What a rank is told at its start: one environment variable, written by the agent's order.

agent/ builds it, agent/rank_main.py puts it into the rank's environment, everstep.attach() reads
it. Everything else a rank needs comes from torchrun's usual variables.
"""

from __future__ import annotations

from everstep.model import Generation, JobId, MachineId, Rank, Step, Term, Value

VARIABLE = "EVERSTEP_ATTACH"
"""Environment variable that holds an AttachContext as JSON."""


class AttachContext(Value, frozen=True, kw_only=True):
    """Identity of this rank, and where its slots are."""

    job: JobId
    machine: MachineId
    term: Term
    generation: Generation
    rank: Rank
    local_rank: int
    world_size: int
    shm: str
    """Directory of the machine's shared memory."""
    notice_socket: str
    """Unix datagram socket of the agent, for notices (never blocks, dropped when full)."""
    restore: Step
    """Step to restore, -1 for none."""
    restore_generation: Generation
    restore_rank: Rank | None = None
    """Whose shard to restore, where the step was saved by another number of ranks; None: its own,
    or with `restore_world` the parts of all ranks' shards that are its own now."""
    restore_world: int = 0
    """How many ranks saved the step, if they were not as many as now."""
    dp: int = 1
    """Data-parallel replicas now."""
    dp_full: int = 1
    """Data-parallel replicas that the job was submitted with."""
    replica: int = 0
    """To which of them this rank belongs, counted from 0."""
    checkpoint_dir: str
    """Directory of the disk tier: step-N/rank-R.shard, published by step-N/manifest.json."""
    local_disk: str = ""
    """Directory on this machine's own disk that may hold this rank's shard; empty: none."""
    backups: bool = False
    """Whether every shard is also kept in the memory of a second machine."""
