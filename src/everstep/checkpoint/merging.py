"""From the states of all ranks to one state: what export.py writes.

Distributed tensors are put together from their local shards, what is the same on all ranks is there
once, and what differs is there once per rank. Pure: trees of Python objects in, a flat dictionary
out, without copying a tensor.

A key is the path to a value joined by dots, as torch.distributed.checkpoint makes it:
"model.layer.weight", "optimizer.state.layer.weight.exp_avg", "data.rank-3.position".
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from everstep.checkpoint.format import EntryKind, StateEntry
from everstep.checkpoint.naming import canonical
from everstep.model import EverstepError

Path = tuple[str | int, ...]
"""Keys of dictionaries and numbers in lists, from the entry's name down to one value."""


class CannotMerge(EverstepError):
    """The ranks' states do not make one state."""


class Piece:
    """A tensor of one rank: a plain one, or its shard of a distributed one."""

    def __init__(
        self, tensor: torch.Tensor, shape: Sequence[int], at: Sequence[int] | None
    ) -> None:
        self.tensor = tensor
        self.shape = tuple(shape)
        """Of the whole."""
        self.at = None if at is None else tuple(at)
        """Where in the whole it begins; None for a plain tensor."""


class Whole:
    """A tensor in pieces that together are all of it."""

    def __init__(self, first: Piece) -> None:
        self.shape = first.shape
        self.dtype = first.tensor.dtype
        self.pieces: dict[tuple[int, ...], torch.Tensor] = {}
        """By the place where each begins."""

    def add(self, piece: Piece) -> bool:
        """Whether it fits to the others: the replica of a piece must be the same as that piece."""
        if (piece.shape, piece.tensor.dtype) != (self.shape, self.dtype):
            return False
        if piece.tensor.numel() == 0 and torch.Size(self.shape).numel():
            return True
        at = piece.at if piece.at is not None else (0,) * len(self.shape)
        known = self.pieces.setdefault(at, piece.tensor)
        return same_bits(known, piece.tensor)

    @property
    def complete(self) -> bool:
        size = torch.Size(self.shape).numel()
        return sum(tensor.numel() for tensor in self.pieces.values()) == size


def merge(
    entry: StateEntry, trees: Mapping[int, Any], world_size: int, notes: list[str]
) -> dict[Path, Any]:
    """One entry of the state, of the ranks that have it. Raises CannotMerge.

    `notes` gets a sentence for what differs between ranks although it should not.
    """
    if entry.kind is EntryKind.OPTIMIZER:
        trees = _join_groups(trees)
    flat = {rank: dict(leaves(tree, entry.kind)) for rank, tree in trees.items()}
    joined: dict[Path, Any] = {}
    apart: set[Path] = set()
    for path in dict.fromkeys(path for tree in flat.values() for path in tree):
        values = {rank: tree[path] for rank, tree in flat.items() if path in tree}
        value = _join(values, key_of((entry.name, *path)))
        if value is not _APART and (len(values) == world_size or entry.kind != EntryKind.OTHER):
            joined[path] = value
        else:
            apart.add(path)
    found = _per_rank(entry, flat, apart, notes) if apart else {}
    stay = not (apart and entry.kind is EntryKind.OTHER)
    return found | {
        (entry.name, *path): value
        for path, value in joined.items()
        if stay or _is_spread(flat, path)
    }


def leaves(tree: Any, kind: EntryKind = EntryKind.OTHER) -> Iterator[tuple[Path, Any]]:
    """All values with their paths. Lists of plain values are values, and so are tuples."""
    if kind in (EntryKind.MODULE, EntryKind.DDP):
        for key, value in tree.items():
            yield (canonical(key, kind),), value
    else:
        yield from _leaves(tree, ())


def key_of(path: Path) -> str:
    return ".".join(map(str, path))


def same_bits(some: torch.Tensor, other: torch.Tensor) -> bool:
    if (some.shape, some.dtype) != (other.shape, other.dtype):
        return False
    if some.data_ptr() == other.data_ptr():
        return True
    flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (some, other)]
    return torch.equal(*flat)


_APART = object()
"""What _join() says of values that differ."""


def _join(values: Mapping[int, Any], key: str) -> Any:
    first = next(iter(values.values()))
    if not any(isinstance(value, Piece) for value in values.values()):
        same = all(_same_object(first, value) for value in values.values())
        return first if same else _APART
    pieces = [value for value in values.values() if isinstance(value, Piece)]
    if len(pieces) < len(values) or len({piece.at is None for piece in pieces}) > 1:
        raise CannotMerge(f"{key} is a distributed tensor on some ranks, but not on others")
    whole = Whole(pieces[0])
    fits = all(whole.add(piece) for piece in pieces)
    if pieces[0].at is None:
        return whole if fits else _APART
    if not (fits and whole.complete):
        raise CannotMerge(
            f"the ranks' shards of {key} do not make a tensor of {list(whole.shape)}: their places "
            "overlap, leave gaps, or replicas differ"
        )
    return whole


def _per_rank(
    entry: StateEntry, flat: Mapping[int, dict[Path, Any]], apart: set[Path], notes: list[str]
) -> dict[Path, Any]:
    """The ranks' own values under their own keys. A loader's state stays together; of a model, the
    tensor that DDP would have broadcast, the lowest rank's, has the plain key as well.
    """
    other = entry.kind is EntryKind.OTHER
    found: dict[Path, Any] = {}
    for rank, values in flat.items():
        for path, value in values.items():
            if path not in apart and (not other or _is_spread(flat, path)):
                continue
            mine = _join({rank: value}, key_of(path))
            found[entry.name, f"rank-{rank}", *path] = mine
            if isinstance(value, Piece) and not other and (entry.name, *path) not in found:
                found[entry.name, *path] = mine
                notes.append(
                    f"{key_of((entry.name, *path))} differs between ranks: rank {rank}'s is under "
                    f"this key, and each rank's own is under {entry.name}.rank-R"
                )
    return found


def _is_spread(flat: Mapping[int, dict[Path, Any]], path: Path) -> bool:
    """Whether it is a distributed tensor."""
    values = (tree[path] for tree in flat.values() if path in tree)
    return any(isinstance(value, Piece) and value.at is not None for value in values)


def _join_groups(trees: Mapping[int, Any]) -> Mapping[int, Any]:
    """Pipeline stages have different parameters in groups that are the same but for that."""
    groups = [tree["param_groups"] for tree in trees.values()]
    if len({len(each) for each in groups}) > 1:
        return trees
    names = [
        list(dict.fromkeys(name for each in groups for name in each[number]["params"]))
        for number in range(len(groups[0]))
    ]
    return {
        rank: {
            **tree,
            "param_groups": [
                {**group, "params": names[number]}
                for number, group in enumerate(tree["param_groups"])
            ],
        }
        for rank, tree in trees.items()
    }


_INNER = (Mapping, list, torch.Tensor, Piece)


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list) and any(isinstance(v, _INNER) for v in value):
        for number, item in enumerate(value):
            yield from _leaves(item, (*path, number))
    else:
        yield path, value


def _same_object(some: Any, other: Any) -> bool:
    if type(some) is not type(other):
        return False
    try:
        if some is other or bool(some == other):
            return True
    except (RuntimeError, TypeError, ValueError):
        pass  # arrays, and what holds them, compare element by element
    return pickle.dumps(some) == pickle.dumps(other)
