"""Which tensors other ranks hold, too: parameters under DDP, replicated distributed tensors.

capture.py marks them in a shard's index, and each of these ranks then writes only its slice of them
to disk (slices.py). It is a guess until their checksums were compared: a mark that is wrong costs a
disk copy, never a state.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from everstep.checkpoint.format import NO_REPLICAS
from everstep.checkpoint.layout import is_distributed, tensors_in
from everstep.model import Rank

SLICED_FROM_BYTES = 4 << 10
"""Smaller tensors are written whole by every rank: a slice of them costs more than it saves."""


class Replicas:
    """The sets of ranks that hold the same tensors, numbered as they are met."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._wrappers: list[DistributedDataParallel] | None = None
        self._plain: dict[int, tuple[Rank, ...]] | None = None
        self._numbers: dict[tuple[Rank, ...], int] = {}
        self.sets: list[tuple[Rank, ...]] = []

    def begin(self) -> None:
        """A new save: the optimizers may have new tensors."""
        self._plain = None

    def of(self, tensor: torch.Tensor, nbytes: int) -> int:
        """Number of the set of ranks that hold this tensor, or NO_REPLICAS."""
        if nbytes < SLICED_FROM_BYTES or not (dist.is_available() and dist.is_initialized()):
            return NO_REPLICAS
        if is_distributed(tensor):
            ranks = _replicas_on_mesh(tensor)
        else:
            if self._plain is None:
                self._plain = dict(self._under_ddp())
            ranks = self._plain.get(tensor.data_ptr(), ())
        if len(ranks) < 2:
            return NO_REPLICAS
        number = self._numbers.setdefault(ranks, len(self.sets))
        if number == len(self.sets):
            self.sets.append(ranks)
        return number

    def _under_ddp(self) -> Iterator[tuple[int, tuple[Rank, ...]]]:
        """Addresses of parameters that DDP keeps equal, and of their optimizer state."""
        if self._wrappers is None:
            self._wrappers = _all_wrappers()
        parameters = {}
        for wrapper in self._wrappers:
            ranks = tuple(map(Rank, sorted(dist.get_process_group_ranks(wrapper.process_group))))
            for name, parameter in wrapper.module.named_parameters():
                if name not in wrapper.parameters_to_ignore:
                    parameters[parameter.data_ptr()] = ranks
        yield from parameters.items()
        for holder in self._state.values():
            if not isinstance(holder, torch.optim.Optimizer) or not hasattr(holder, "state"):
                continue
            for parameter, values in holder.state.items():
                ranks = parameters.get(parameter.data_ptr(), ())
                for tensor in tensors_in(values):
                    if ranks and tensor.shape == parameter.shape:
                        yield tensor.data_ptr(), ranks


def _all_wrappers() -> list[DistributedDataParallel]:
    """The script gives us the model; that it is wrapped is known to the wrapper alone.

    isinstance() would ask proxies and weak references, which may run code or raise.
    """
    return [found for found in gc.get_objects() if issubclass(type(found), DistributedDataParallel)]


def _replicas_on_mesh(tensor: Any) -> tuple[Rank, ...]:
    """The ranks that differ from this one only along dimensions that replicate."""
    mesh = tensor.device_mesh
    here = mesh.get_coordinate()
    if here is None:
        return ()
    cut = tuple(
        slice(None) if placement.is_replicate() else place
        for placement, place in zip(tensor.placements, here, strict=True)
    )
    return tuple(map(Rank, sorted(mesh.mesh[cut].flatten().tolist())))
