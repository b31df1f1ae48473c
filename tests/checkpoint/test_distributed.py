"""Distributed tensors come back as they were, in place; shards of other layouts are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from everstep.trainer.checkpoint import CheckpointUnusable
from tests.checkpoint.nets import LAYOUTS, Training, checkpoint, same, trained
from tests.checkpoint.ranks import Ranks

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    forked = Ranks()
    yield forked
    forked.close()


def restore_and_go_on(layout: str, shm: str) -> None:
    training = trained(layout, shm)
    again = Training(layout, seed=7)
    places = [tensor.data_ptr() for tensor in again.net.parameters()]
    assert checkpoint(shm, again.state, restore=2).restore() == 3
    assert same(again.bits(), training.bits())
    assert [tensor.data_ptr() for tensor in again.net.parameters()] == places
    for _ in range(2):
        training.step()
        again.step()
    assert same(again.bits(), training.bits())


@pytest.mark.parametrize(("layout", "world_size"), LAYOUTS.items())
def test_a_restored_layout_holds_the_same_bits_and_trains_on_alike(
    ranks: Ranks, shm: Path, layout: str, world_size: int
) -> None:
    ranks.run(world_size, restore_and_go_on, layout, shm)


class Loose:
    """Distributed tensors of every placement that belong to no module and no optimizer."""

    def __init__(self, fill: float) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        whole = torch.arange(30.0).reshape(5, 6) + fill
        local = torch.full((2, 3), fill + dist.get_rank())
        self.state: dict[str, Any] = {
            "columns": distribute_tensor(whole, mesh, [Shard(1), Shard(0)]),
            "bf16": distribute_tensor(whole.bfloat16().t(), mesh, [Replicate(), Shard(0)]),
            "summand": DTensor.from_local(local, mesh, [Partial(), Shard(0)]),
            "row": distribute_tensor(whole[:1], mesh["a"], [Shard(0)]),
            "nested": [{"mask": distribute_tensor(whole > 20, mesh["b"], [Replicate()])}],
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def restore_every_placement(shm: str) -> None:
    saved = Loose(1.0)
    ckpt = checkpoint(shm, {"loose": saved})
    ckpt.save(0)
    ckpt.flush(30)
    loaded = Loose(2.0)
    checkpoint(shm, {"loose": loaded}, restore=0).restore()
    for name in ("columns", "bf16", "summand", "row"):
        was, now = saved.state[name], loaded.state[name]
        assert now.placements == was.placements
        assert now.device_mesh == was.device_mesh
        assert (now.shape, now.stride()) == (was.shape, was.stride())
        assert now.to_local().stride() == was.to_local().stride()
        assert same([now.to_local()], [was.to_local()])
    assert same([loaded.state["columns"].full_tensor()], [saved.state["columns"].full_tensor()])
    mask = loaded.state["nested"][0]["mask"]
    assert torch.equal(mask.to_local(), saved.state["nested"][0]["mask"].to_local())


def test_tensors_of_every_placement_come_back_with_it(ranks: Ranks, shm: Path) -> None:
    ranks.run(4, restore_every_placement, shm)


def refuse_other_mesh(shm: str) -> None:
    trained("fsdp", shm)
    with pytest.raises(
        CheckpointUnusable, match=r"'model'.* saved on a cpu mesh of dp=2 with ranks"
    ):
        checkpoint(shm, Training("ddp").state, restore=2).restore()
    with pytest.raises(CheckpointUnusable, match=r"'model'.*script now has a cpu mesh of 0=2"):
        checkpoint(shm, Training("tp").state, restore=2).restore()


class Rows(torch.nn.Module):
    """One distributed parameter."""

    def __init__(self, placement: Shard) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (2,))
        self.weight = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [placement]))


def refuse_other_placement(shm: str) -> None:
    ckpt = checkpoint(shm, {"model": Rows(Shard(0))})
    ckpt.save(0)
    ckpt.flush(30)
    with pytest.raises(
        CheckpointUnusable, match=r"placed as S\(0\) .* now has .* placed as S\(1\)"
    ):
        checkpoint(shm, {"model": Rows(Shard(1))}, restore=0).restore()


def test_a_shard_of_another_layout_is_refused_by_name(ranks: Ranks, shm: Path) -> None:
    ranks.run(2, refuse_other_mesh, shm)
    ranks.run(2, refuse_other_placement, shm)


class Grid(torch.nn.Module):
    """A parameter that is replicated along one dimension of a mesh and cut along the other."""

    def __init__(self, dp: int, fill: float) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dp, 2), mesh_dim_names=("dp", "tp"))
        whole = torch.arange(16.0).reshape(4, 4) + fill
        self.weight = torch.nn.Parameter(
            distribute_tensor(whole, mesh, [Replicate(), Shard(1)]), requires_grad=False
        )


def save_grid(shm: str) -> None:
    ckpt = checkpoint(shm, {"model": Grid(2, 1.0)})
    ckpt.save(0)
    ckpt.flush(30)


def restore_with_one_replica_less(shm: str) -> None:
    grid, rank = Grid(1, 5.0), dist.get_rank()
    wrong = checkpoint(shm, {"model": grid}, restore=0, saved_by=(3 - rank, 4))
    with pytest.raises(CheckpointUnusable, match="the state is not replicated"):
        wrong.restore()
    checkpoint(shm, {"model": grid}, restore=0, saved_by=(2 + rank, 4)).restore()
    restored: Any = grid.weight
    assert same([restored.full_tensor()], [torch.arange(16.0).reshape(4, 4) + 1.0])


def test_a_rank_goes_on_with_the_shard_of_one_that_was_alike(ranks: Ranks, shm: Path) -> None:
    ranks.run(4, save_grid, shm)
    ranks.run(2, restore_with_one_replica_less, shm)


def tear(shm: str) -> None:
    training = Training("fsdp")
    ckpt = checkpoint(shm, training.state)
    training.step()
    ckpt.save(0)
    ckpt.flush(30)
    assert ckpt.saved_step == 0
    ckpt.save(1)
    with torch.no_grad():
        training.net.up.weight.add_(1)  # not by the optimizer that asks first
    training.step()
    ckpt.flush(30)
    assert ckpt.saved_step == 0


def test_a_shard_that_changes_while_it_is_copied_is_no_checkpoint(ranks: Ranks, shm: Path) -> None:
    ranks.run(2, tear, shm)
