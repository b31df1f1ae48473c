"""A tiny model in every layout that gloo can train, and its checkpoint, as one rank has them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from everstep.checkpoint.layout import local_of, tensors_in
from everstep.model import Generation, JobId, MachineId, Rank, Step, Term
from everstep.trainer.checkpoint import Checkpoint
from everstep.trainer.context import AttachContext
from everstep.trainer.notices import Notices
from everstep.trainer.place import Place

WIDTH = 10


class Net(nn.Module):
    """Sizes that no number of ranks divides, and a bias that is shorter than most."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 14)
        self.down = nn.Linear(14, WIDTH)
        self.gate = nn.Linear(WIDTH, 1)
        self.seen = nn.Buffer(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        y: torch.Tensor = x + self.gate(x) * self.down(torch.relu(self.up(x)))
        return y


class Training:
    """One rank of a training run under one layout."""

    def __init__(self, layout: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.layout = layout
        self.net = Net()
        self.forward: nn.Module = self.net
        self.replica = self._parallelise()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2, foreach=False)
        self.data = Position()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.net, "optimizer": self.optimizer, "data": self.data}

    def step(self) -> None:
        self.optimizer.zero_grad()
        dice = torch.Generator().manual_seed(self.data.next() * 100 + self.replica)
        batch = torch.randn(4, WIDTH, generator=dice)
        self.forward(batch).square().mean().backward()
        self.optimizer.step()

    def locals(self) -> list[torch.Tensor]:
        """Everything that this rank holds, live."""
        everything = [self.net.state_dict(), self.optimizer.state_dict()["state"]]
        return [local_of(tensor) for tensor in tensors_in(everything)]

    def bits(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self.locals()]

    def _parallelise(self) -> int:
        """Cut the model up; the number of this rank's replica, which decides its batches."""
        size = dist.get_world_size()
        if self.layout == "ddp":
            self.forward = DistributedDataParallel(self.net)
            return dist.get_rank()
        if self.layout == "fsdp":
            fully_shard(self.net, mesh=init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)))
            return dist.get_rank()
        if self.layout == "hsdp":
            names = ("replicate", "shard")
            fully_shard(
                self.net, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=names)
            )
            return dist.get_rank()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if self.layout == "tp":
            parallelize_module(self.net, init_device_mesh("cpu", (size,)), plan)
            return 0
        assert self.layout == "fsdp-tp"
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(self.net, mesh["tp"], plan)
        fully_shard(self.net, mesh=mesh["dp"])
        return mesh.get_local_rank("dp")


class Position:
    """A data loader: what it gives is another thing on every rank."""

    def __init__(self) -> None:
        self.position = 0
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def next(self) -> int:
        self.position += 1
        return self.position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "rank": self.rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.rank = state["rank"]


def checkpoint(
    shm: str,
    state: dict[str, Any],
    *,
    restore: int = -1,
    directory: str = "",
    from_dcp: str | None = None,
    saved_by: tuple[int | None, int] | None = None,
) -> Checkpoint:
    """What run.checkpoint() returns to this rank, told to restore a step.

    `saved_by`: a rank, of so many, when the job had another size. No rank: all of them together.
    """
    saver, savers = saved_by or (None, 0)
    context = AttachContext(
        job=JobId("job"),
        machine=MachineId("machine"),
        term=Term(1),
        generation=Generation(2 if restore >= 0 else 1),
        rank=Rank(dist.get_rank()),
        local_rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        shm=shm,
        notice_socket="",
        restore=Step(restore),
        restore_generation=Generation(1),
        checkpoint_dir=directory,
        restore_rank=None if saver is None else Rank(saver),
        restore_world=savers,
    )
    place = Place(context=context, local_ranks=dist.get_world_size())
    notices = Notices(None, context.rank, context.generation)
    return Checkpoint(place, state, notices, explicit_wait=False, from_dcp=from_dcp)


def trained(layout: str, shm: str, steps: int = 3) -> Training:
    """Train and save every step; the last is complete in memory."""
    training = Training(layout)
    ckpt = checkpoint(shm, training.state)
    for step in range(steps):
        training.step()
        ckpt.save(step)
    ckpt.flush(30)
    assert ckpt.saved_step == steps - 1
    return training


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Bit for bit."""
    return all(_same(a, b) for a, b in zip(some, others, strict=True))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


LAYOUTS = {"ddp": 2, "fsdp": 3, "tp": 2, "hsdp": 4, "fsdp-tp": 4}
"""Layouts, and ranks enough for them."""
