"""Ways to spread the GPT over ranks: what --parallel of train.py means.

Nothing in it knows of everstep.

    ddp      every rank has the whole model, and its own batches
    fsdp     parameters, gradients and optimizer state are cut up over all ranks (FSDP2)
    fsdp-tp  a mesh of dp x 2: two ranks share each layer (tensor parallel), FSDP2 across the pairs

All are deterministic on the CPU and on a GPU with deterministic kernels: the same number of ranks
gives the same bits. They differ from each other in the last bits, as they add in another order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LAYOUTS = ("ddp", "fsdp", "fsdp-tp")
TENSOR_PARALLEL = 2


class Spread(NamedTuple):
    """A model that was spread over the ranks."""

    forward: nn.Module
    """What to call. Its parameters are those of the model that was given, now perhaps cut up."""
    replica: int
    """Ranks of one replica see the same batches, and others see others."""
    fused: bool
    """Whether one fused AdamW step can be made over all parameters."""


def spread(model: nn.Module, layout: str, device: torch.device, seq: int) -> Spread:
    """Join the model with those of the other ranks, if there are any."""
    if not dist.is_initialized():
        return Spread(model, 0, fused=True)
    if layout == "ddp":
        return Spread(_data_parallel(model, device, seq), dist.get_rank(), fused=True)
    # Imported here, because these take two seconds that DDP does not need.
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    size = dist.get_world_size()
    if layout == "fsdp":
        mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("dp",))
    else:
        if size % TENSOR_PARALLEL:
            raise SystemExit(f"--parallel fsdp-tp needs an even number of ranks, not {size}")
        shape = (size // TENSOR_PARALLEL, TENSOR_PARALLEL)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))
        _tensor_parallel(model, mesh["tp"])
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    # Some parameters lie on both dimensions of the mesh and some on one: no fused step takes both.
    return Spread(model, mesh.get_local_rank("dp"), fused=layout == "fsdp")


def _data_parallel(model: nn.Module, device: torch.device, seq: int) -> nn.Module:
    """Wrap the model in DDP, with the buckets that every later step will have.

    DDP lays its gradient buckets out anew after the first backward pass. In a restarted process
    that would be another step than in an undisturbed one, and with more than two ranks gloo then
    adds the same numbers in another order. One backward pass on nothing settles the layout.
    """
    wrapped = DistributedDataParallel(model)
    nothing = torch.zeros(1, seq, dtype=torch.long, device=device)
    wrapped(nothing, nothing).backward()
    wrapped.zero_grad()
    return wrapped


def _tensor_parallel(model: nn.Module, mesh: dist.device_mesh.DeviceMesh) -> None:
    """Attention is cut by heads and the perceptron by its inner width; both end in one sum."""
    from torch.distributed.tensor.parallel import (  # noqa: PLC0415 -- see above
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {
        "qkv": ColwiseParallel(),
        "out": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    for block in model.get_submodule("blocks").children():
        parallelize_module(block, mesh, plan)
