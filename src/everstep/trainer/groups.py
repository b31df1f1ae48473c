"""What this rank shows of the job's layout: the mesh it was given, and its process groups.

Told once per generation, after the first step, when the groups of a script exist: in a small file
beside the heartbeat slots, which the agent of the machine reads when it sees that step. However
many members a group has, it is a few numbers here, the same on every rank of a regular layout.
torch is not imported for this; a script that has process groups has imported it.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import msgspec

from everstep.core.seen import shape_of, united
from everstep.model import Generation, GroupShape, SeenGroups, Value

GROUPS_MAX = 64
"""Kinds of groups that one rank tells of; no framework has half as many."""
NAME_CHARS_MAX = 64


class RankGroups(Value, frozen=True, kw_only=True):
    """Content of the file."""

    generation: Generation
    seen: SeenGroups


def file_of(shm: Path, local_rank: int) -> Path:
    return shm / f"groups-{local_rank}"


def tell(shm: Path, local_rank: int, told: RankGroups) -> None:
    """Write the file, whole or not at all. OSError if there is no room."""
    path = file_of(shm, local_rank)
    beside = path.with_name(f".{path.name}")
    beside.write_bytes(msgspec.json.encode(told))
    beside.replace(path)


def seen_here(mesh: Any, world_size: int) -> SeenGroups:
    """All that this rank can show. `mesh` is a DeviceMesh or None."""
    shapes, problem = ((), "") if mesh is None else _of_mesh(mesh, world_size)
    groups, odd = _of_process_groups()
    return united([SeenGroups(mesh=shapes, mesh_problem=problem, groups=groups, odd=odd)])


def _of_mesh(mesh: Any, world_size: int) -> tuple[tuple[GroupShape, ...], str]:
    """The shapes of its dimensions, or why there are none.

    The place of a rank in the mesh must be a matter of its number: any order of dimensions will do,
    but no other permutation.
    """
    table = mesh.mesh
    sizes, ranks = list(table.shape), table.flatten().tolist()
    names = mesh.mesh_dim_names or [""] * len(sizes)
    if sorted(ranks) != list(range(world_size)):
        return (), f"it has {len(ranks)} of {world_size} ranks: give the whole mesh, not a part"
    inside = [math.prod(sizes[at + 1 :]) for at in range(len(sizes))]
    strides = [ranks[row] if size > 1 else 0 for row, size in zip(inside, sizes, strict=True)]
    for index, rank in enumerate(ranks):
        place = [index // row % size for row, size in zip(inside, sizes, strict=True)]
        if rank != sum(c * stride for c, stride in zip(place, strides, strict=True)):
            return (), f"its ranks are in an order of their own: rank {rank} is at {place}"
    return tuple(
        GroupShape(name=str(name)[:NAME_CHARS_MAX], factors=((stride, size),))
        for name, stride, size in zip(names, strides, sizes, strict=True)
        if size > 1
    ), ""


def _of_process_groups() -> tuple[tuple[GroupShape, ...], tuple[str, ...]]:
    """Of all groups of torch.distributed that this rank is in; names of those without a shape."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return (), ()
    shapes: dict[GroupShape, None] = {}
    odd: dict[str, None] = {}
    for group, members in list(c10d._world.pg_group_ranks.items()):  # noqa: SLF001 -- no other way
        name = str(getattr(group, "group_desc", ""))[:NAME_CHARS_MAX]
        name = "" if name == "undefined" else name
        factors = shape_of(list(members))
        if factors is None:
            odd[name or f"unnamed, {len(members)} ranks"] = None
        elif factors:
            shapes[GroupShape(name=name, factors=factors)] = None
    return tuple(shapes)[:GROUPS_MAX], tuple(odd)[:GROUPS_MAX]
