"""The states of all ranks become one: what is the same is there once, the rest per rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from everstep.checkpoint.format import EntryKind, StateEntry
from everstep.checkpoint.merging import CannotMerge, Piece, Whole, key_of, leaves, merge
from everstep.checkpoint.naming import Names, canonical, kind_of


def entry(kind: EntryKind = EntryKind.OTHER, name: str = "it") -> StateEntry:
    return StateEntry(name=name, skeleton=b"", kind=kind)


def plain(*values: float) -> Piece:
    tensor = torch.tensor(values)
    return Piece(tensor, tensor.shape, None)


def shard(at: int, *values: float, of: int = 4) -> Piece:
    return Piece(torch.tensor(values, dtype=torch.float), (of,), (at,))


def merged(
    kind: EntryKind, *trees: Any, world_size: int | None = None
) -> tuple[dict[str, Any], list[str]]:
    notes: list[str] = []
    size = len(trees) if world_size is None else world_size
    found = merge(entry(kind), dict(enumerate(trees)), size, notes)
    return {key_of(path): content(value) for path, value in found.items()}, notes


def content(value: Any) -> Any:
    if not isinstance(value, Whole):
        return value
    return {at: tensor.tolist() for at, tensor in value.pieces.items()}


def test_shards_are_put_together_and_replicas_are_there_once() -> None:
    trees = [
        {"weight": shard(0, 1, 2), "bias": plain(9)},
        {"weight": shard(2, 3, 4), "bias": plain(9)},
        {"weight": shard(0, 1, 2), "bias": plain(9)},
    ]
    found, notes = merged(EntryKind.MODULE, *trees)
    assert found == {"it.weight": {(0,): [1, 2], (2,): [3, 4]}, "it.bias": {(0,): [9]}}
    assert notes == []


@pytest.mark.parametrize(
    "second",
    [shard(3, 4), shard(0, 5, 6), shard(1, 3, 4, 5), shard(2, 3, 4, of=5), plain(3, 4)],
    ids=["gap", "replica differs", "too much", "other size", "plain"],
)
def test_shards_that_make_no_whole_are_refused_by_name(second: Piece) -> None:
    with pytest.raises(CannotMerge, match=r"it\.weight"):
        merged(EntryKind.MODULE, {"weight": shard(0, 1, 2)}, {"weight": second})


def test_empty_shards_of_ranks_beyond_the_tensor_do_not_count() -> None:
    found, _ = merged(EntryKind.MODULE, {"w": shard(0, 1, 2, 3, 4)}, {"w": shard(4)})
    assert found == {"it.w": {(0,): [1, 2, 3, 4]}}
    found, _ = merged(EntryKind.MODULE, {"w": shard(0, of=0)}, {"w": shard(0, of=0)})
    assert found == {"it.w": {(0,): []}}


def test_a_buffer_that_differs_is_the_lowest_ranks_and_each_ones_own_with_a_note() -> None:
    trees = [{"mean": plain(1), "w": plain(5)}, {"mean": plain(2), "w": plain(5)}]
    found, notes = merged(EntryKind.MODULE, *trees)
    assert found == {
        "it.w": {(0,): [5]},
        "it.mean": {(0,): [1]},
        "it.rank-0.mean": {(0,): [1]},
        "it.rank-1.mean": {(0,): [2]},
    }
    assert len(notes) == 1
    assert "it.mean differs between ranks: rank 0's" in notes[0]


def test_a_loader_that_differs_anywhere_is_whole_under_each_ranks_key() -> None:
    trees = [{"epoch": 1, "at": rank, "average": shard(2 * rank, 7, 8)} for rank in range(2)]
    found, notes = merged(EntryKind.OTHER, *trees)
    assert found == {
        "it.average": {(0,): [7, 8], (2,): [7, 8]},
        "it.rank-0.epoch": 1,
        "it.rank-0.at": 0,
        "it.rank-1.epoch": 1,
        "it.rank-1.at": 1,
    }
    assert notes == []
    alike, _ = merged(EntryKind.OTHER, {"epoch": 1}, {"epoch": 1})
    assert alike == {"it.epoch": 1}


def test_what_not_all_ranks_have_is_kept_per_rank() -> None:
    found, _ = merged(EntryKind.OTHER, {"epoch": 1}, world_size=2)
    assert found == {"it.rank-0.epoch": 1}


def test_pipeline_stages_have_one_optimizer_together() -> None:
    stages = [
        {
            "state": {f"layer{stage}": {"moment": plain(stage)}},
            "param_groups": [{"lr": 0.1, "params": [f"layer{stage}", "tied"]}],
        }
        for stage in range(2)
    ]
    found, notes = merged(EntryKind.OPTIMIZER, *stages)
    assert found == {
        "it.state.layer0.moment": {(0,): [0]},
        "it.state.layer1.moment": {(0,): [1]},
        "it.param_groups.0.lr": 0.1,
        "it.param_groups.0.params": ["layer0", "tied", "layer1"],
    }
    assert notes == []


def test_paths_are_those_of_torchs_own_checkpoints() -> None:
    tensor = torch.ones(1)
    tree = {"a": [1, 2], "b": [{"c": 3}, tensor], "d": (1, tensor), "e": {}, "f": {5: 6}}
    found = {key_of(path): value for path, value in leaves(tree)}
    assert list(found) == ["a", "b.0.c", "b.1", "d", "e", "f"]


# --- names ---------------------------------------------------------------------------------------


def test_an_optimizers_parameters_have_their_modules_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups: list[dict[str, Any]] = [
        {"params": model[1].parameters()},
        {"params": [model[0].bias]},
    ]
    optimizer = torch.optim.SGD(groups)
    names = Names({"model": model, "optimizer": optimizer})
    assert names.of("optimizer") == ("1.weight", "1.bias", "0.bias")
    optimizer.add_param_group({"params": [model[0].weight]})
    assert names.of("optimizer")[-1] == "0.weight"
    assert names.of("model") == ()
    assert names.of("everstep.rng") == ()


def test_two_modules_of_one_optimizer_are_told_apart_by_their_entries() -> None:
    one, two, alone = nn.Linear(2, 2), nn.Linear(2, 2), nn.Parameter(torch.ones(1))
    parameters: list[torch.Tensor] = [*one.parameters(), *two.parameters(), alone]
    optimizer = torch.optim.SGD(parameters)
    names = Names({"g": one, "d": two, "o": optimizer})
    assert names.of("o") == ("g.weight", "g.bias", "d.weight", "d.bias", "")


def test_names_are_those_without_wrappers() -> None:
    assert canonical("module.block._orig_mod.weight", EntryKind.DDP) == "block.weight"
    assert canonical("module.weight", EntryKind.MODULE) == "module.weight"
    assert kind_of(nn.Linear(1, 1)) is EntryKind.MODULE
    assert kind_of({}) is EntryKind.OTHER
