"""Names for what a shard holds, as the rest of PyTorch would say them.

An optimizer numbers its parameters, and the numbers differ between layouts; its module names them,
and the names do not. capture.py stores them beside the state; export.py and start.py use them.
Names are canonical: without the "module." of DDP and the "_orig_mod." of torch.compile, which
torch.distributed.checkpoint.state_dict leaves out as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from everstep.checkpoint.format import EntryKind

_COMPILED = "_orig_mod."
_DDP = "module."


class Names:
    """Kinds and names of the entries of one state."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._known: dict[str, tuple[int, tuple[str, ...]]] = {}

    def of(self, entry: str) -> tuple[str, ...]:
        """For an optimizer, a name for each parameter; else nothing."""
        holder = self._state.get(entry)
        if kind_of(holder) is not EntryKind.OPTIMIZER:
            return ()
        parameters = parameters_of(holder)
        count, names = self._known.get(entry, (-1, ()))
        if count != len(parameters):
            names = self._name(parameters)
            self._known[entry] = (len(parameters), names)
        return names

    def _name(self, parameters: list[torch.Tensor]) -> tuple[str, ...]:
        """Two modules may use one name: then the entry's name comes first, for all."""
        found = dict(reversed(list(self._modules_parameters())))
        owners = [found.get(id(parameter), ("", "")) for parameter in parameters]
        uses = Counter(name for _, name in owners)
        unique = all(count == 1 or not name for name, count in uses.items())
        return tuple(name if unique or not name else f"{entry}.{name}" for entry, name in owners)

    def _modules_parameters(self) -> Iterator[tuple[int, tuple[str, str]]]:
        for entry, holder in self._state.items():
            kind = kind_of(holder)
            if kind in (EntryKind.MODULE, EntryKind.DDP):
                for name, parameter in holder.named_parameters():
                    yield id(parameter), (entry, canonical(name, kind))


def kind_of(holder: object) -> EntryKind:
    if isinstance(holder, DistributedDataParallel):
        return EntryKind.DDP
    if isinstance(holder, torch.nn.Module):
        return EntryKind.MODULE
    # A wrapper that only inherits the type keeps its state in its own way.
    if isinstance(holder, torch.optim.Optimizer) and hasattr(holder, "_optimizer_step_pre_hooks"):
        return EntryKind.OPTIMIZER
    return EntryKind.OTHER


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """In the order of their numbers in the optimizer's state_dict()."""
    found = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    return list(found.values())


def canonical(key: str, kind: EntryKind) -> str:
    """A key of a module's state_dict() as it would be without wrappers."""
    if kind is EntryKind.DDP:
        key = key.removeprefix(_DDP)
    return key.replace(_COMPILED, "")
