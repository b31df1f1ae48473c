"""What the names of parallel groups mean: those that frameworks give to meshes and process groups.

Used where names decide something (placement.py, seen.py). A name that is not here is not guessed
at: its group counts as one of unknown purpose, and people are told. The names are those of
torchtitan (ParallelDims), of torch's DeviceMesh, which puts "mesh_" before them when it makes
process groups, and of Megatron-LM (parallel_state).
"""

from __future__ import annotations

_ROLES = {
    "tp": ("tp", "tensor", "tensor_parallel", "tensor_model_parallel_group"),
    "cp": ("cp", "sp", "context_parallel", "context_parallel_group"),
    "dp": (
        "dp",
        "ddp",
        "data",
        "data_parallel",
        "data_parallel_group",
        "data_parallel_group_gloo",
        "dp_replicate",
        "dp_shard",
        "dp_shard_mod_ep",
        "dp_shard_in_ep",
        "replicate",
        "shard",
        "fsdp",
        "hsdp",
        "efsdp",
    ),
    "pp": ("pp", "pipeline", "pipeline_parallel", "pipeline_model_parallel_group"),
    "ep": ("ep", "expert", "expert_parallel", "expert_model_parallel_group"),
}
_ROLE = {name: role for role, names in _ROLES.items() for name in names}
_BETWEEN_STAGES = ("embedding_group", "position_embedding_group")
"""Megatron-LM: the first and the last pipeline stage share their embeddings."""
NAMES = "tp, cp, dp, dp_replicate, dp_shard, fsdp, pp, ep"
"""For people: those that are worth saying."""


def plain(name: str) -> str:
    """Without what torch puts before it."""
    return name.lower().removeprefix("mesh_")


def role(name: str) -> str:
    """tp, cp, dp, pp or ep; empty for a name that says nothing to us."""
    return _ROLE.get(plain(name), "")


def is_no_dimension(name: str) -> bool:
    """Whether a group of this name is known to lie across the grid."""
    return plain(name) in _BETWEEN_STAGES
