"""From a published step to a directory that torch.distributed.checkpoint (DCP) loads without us.

`everstep checkpoint export` calls it, in one process and without starting torch.distributed. Shards
are mapped, not read into memory, and distributed tensors are written piece by piece, so a step that
is larger than memory can be exported. Loading it in another layout is DCP's work.

Unpickles what the job's own ranks pickled: whoever can write the checkpoint directory can run code
here, as in the job.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from everstep.checkpoint.capture import element_type, views_of
from everstep.checkpoint.digest import check_digest
from everstep.checkpoint.format import (
    EntryKind,
    Expected,
    Shard,
    StateEntry,
    unpack_index,
)
from everstep.checkpoint.load import Reader
from everstep.checkpoint.merging import CannotMerge, Path, Piece, Whole, key_of, merge
from everstep.checkpoint.tier import Tier
from everstep.model import Rank, Step, UserError, Value

ABOUT = "everstep"
"""First part of the keys that say where an export comes from: step, generation, world_size."""
_UNREADABLE = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    ImportError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What unpickling raises when classes are gone or have changed."""


class ExportRefused(UserError):
    """There is nothing to export, or nowhere to put it."""


class Exported(Value, frozen=True, kw_only=True):
    """What export() wrote."""

    keys: int
    tensor_bytes: int
    notes: tuple[str, ...]
    """Sentences about what was left out or differs between ranks."""


def export(source: Tier, step: Step, target: FilePath) -> Exported:
    """Write a published step as a DCP directory.

    Raises ExportRefused if `target` holds something, ShardMissing or ShardBad if the step is not
    whole, CannotMerge if the ranks' states make no whole, OSError, TierFailed.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExportRefused(f"{target} exists and is not empty: name a new directory")
    manifest = source.manifest(step)
    ranks = {
        rank: _RankState(_open(source, step, Rank(rank))) for rank in range(manifest.world_size)
    }
    notes: list[str] = []
    about = {"step": step, "generation": manifest.generation, "world_size": manifest.world_size}
    found: dict[Path, Any] = {(ABOUT, name): value for name, value in about.items()}
    for name in dict.fromkeys(name for state in ranks.values() for name in state.entries):
        found |= _entry(name, ranks, notes)
    _write(found, target)
    sizes = [
        tensor.nbytes
        for value in found.values()
        if isinstance(value, Whole)
        for tensor in value.pieces.values()
    ]
    return Exported(keys=len(found), tensor_bytes=sum(sizes), notes=tuple(notes))


def _open(source: Tier, step: Step, rank: Rank) -> Shard:
    shard = source.read(Expected(step=step, rank=rank))
    check_digest(shard)
    return shard


class _RankState:
    """One rank's shard, opened."""

    def __init__(self, shard: Shard) -> None:
        self._index, at = unpack_index(shard.payload)
        self._area = shard.payload[at:]
        self.entries = {entry.name: entry for entry in self._index.entries}

    def tree(self, name: str) -> Any:
        """The entry with a Piece for each tensor. Raises what unpickling it raises."""
        entry = self.entries[name]
        tree = Reader(entry.skeleton, self._piece).load()
        return _with_names(tree, entry.names) if entry.kind is EntryKind.OPTIMIZER else tree

    def _piece(self, number: int) -> Piece:
        entry = self._index.tensors[number]
        (view,) = views_of(self._area, [entry])
        tensor = view.view(element_type(entry))
        placed = entry.placed
        if placed is None:
            return Piece(tensor, entry.shape, None)
        if any(word.startswith("P") for word in placed.placements):
            raise CannotMerge(
                f"a distributed tensor of {list(placed.shape)} is a sum that nobody has made yet "
                "(its placement is Partial): the state must hold redistributed tensors"
            )
        return Piece(tensor, placed.shape, placed.at)


def _with_names(tree: Any, names: tuple[str, ...]) -> Any:
    """An optimizer's state under its parameters' names instead of their numbers."""

    def named(number: int) -> str:
        known = names[number] if number < len(names) else ""
        return known or str(number)

    return {
        **tree,
        "state": {named(number): values for number, values in tree["state"].items()},
        "param_groups": [
            {**group, "params": [named(number) for number in group["params"]]}
            for group in tree["param_groups"]
        ],
    }


def _entry(name: str, ranks: Mapping[int, _RankState], notes: list[str]) -> dict[Path, Any]:
    having = {rank: state for rank, state in ranks.items() if name in state.entries}
    first: StateEntry = next(iter(having.values())).entries[name]
    trees = {}
    for rank, state in having.items():
        try:
            trees[rank] = state.tree(name)
        except _UNREADABLE as error:
            if first.kind is not EntryKind.OTHER:
                raise CannotMerge(f"{name!r} of rank {rank} cannot be read: {error}") from error
            notes.append(
                f"{name!r} is left out, because it cannot be read here ({error}): set PYTHONPATH "
                "to where the training script imports its modules from"
            )
            return {}
    return merge(first, trees, len(ranks), notes)


def _write(found: dict[Path, Any], target: FilePath) -> None:
    writer = FileSystemWriter(target)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*")
        try:
            save({}, storage_writer=writer, planner=_Planner(found), no_dist=True)
        except CheckpointException as error:
            raise CannotMerge(f"torch.distributed.checkpoint refuses it: {error}") from error


class _Planner(DefaultSavePlanner):
    """Tells DCP of tensors in pieces, which it otherwise knows only from ranks of a running job."""

    def __init__(self, found: dict[Path, Any]) -> None:
        super().__init__()
        self._paths = {key_of(path): path for path in found}
        self._values = {key_of(path): value for path, value in found.items()}
        if len(self._values) < len(found):
            raise CannotMerge("two values would have the same key: no name may hold a dot")

    def set_up_planner(
        self,
        state_dict: dict[str, Any],  # noqa: ARG002 -- ours is not a state_dict yet
        storage_meta: Any = None,  # noqa: ARG002
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 -- DCP's own signature
    ) -> None:
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        items = [item for key, value in self._values.items() for item in _items(key, value)]
        self.plan = SavePlan(items, planner_data=self._paths)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self._values[index.fqn]
        if isinstance(value, Whole):
            assert index.offset is not None
            return value.pieces[tuple(index.offset)]
        return value

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 -- DCP's
        if write_item.type is not WriteItemType.BYTE_IO:
            return object
        file = io.BytesIO()
        torch.save(_with_tensors(object), file)
        return file


def _items(key: str, value: Any) -> list[WriteItem]:
    if not isinstance(value, Whole):
        return [WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO)]
    return [
        WriteItem(
            index=MetadataIndex(key, at),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=torch.Size(at), sizes=tensor.size()),
                properties=TensorProperties.create_from_tensor(tensor),
                size=torch.Size(value.shape),
            ),
        )
        for at, tensor in value.pieces.items()
    ]


def _with_tensors(value: Any) -> Any:
    """A value that is kept as it is (a tuple, say) with the plain tensors that lie in it."""
    if isinstance(value, Piece):
        if value.at is not None:
            raise CannotMerge(
                "a distributed tensor lies in a tuple, or in a dictionary whose keys are no words: "
                "use a list, or words"
            )
        return value.tensor
    if isinstance(value, Mapping):
        return {key: _with_tensors(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(item) for item in value)
    return value
