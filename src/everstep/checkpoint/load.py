"""From a shard back into live training objects, bit for bit.

Called by Run.checkpoint()'s restore, on the training thread, before the first step. Modules copy
straight out of the mapped shard into their parameters. Everything else keeps what it is given, so
it is given tensors of its own: a live tensor that still lay in a slot would change under training
when the slot is overwritten. Those are fresh memory, which costs more than the copy: hence the huge
pages and the threads. (An optimizer that has just been made has no state to copy into.)
"""

from __future__ import annotations

import io
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from everstep.checkpoint.capture import Stateful, element_type, views_of
from everstep.checkpoint.format import (
    Shard,
    ShardBad,
    ShardIndex,
    StateEntry,
    tensor_at,
    unpack_index,
)
from everstep.checkpoint.guard import hookable
from everstep.checkpoint.layout import LiveMeshes, OtherLayout, check_same_layout
from everstep.checkpoint.pages import prefer_huge
from everstep.checkpoint.rng import RNG_ENTRY, set_rng_states
from everstep.checkpoint.threads import do_all
from everstep.model import EverstepError

_MISFITS = (OtherLayout, RuntimeError, ValueError, KeyError, TypeError, AttributeError)


class DoesNotFit(EverstepError):
    """The checkpoint is whole, but it is not one of this script's state."""


HUGE_FROM_BYTES = 4 << 20
"""Smaller tensors hold no whole page of 2 MiB for certain."""


class Tensors:
    """The tensors of one shard, as views of it or as copies on the device they were on."""

    def __init__(
        self, index: ShardIndex, area: memoryview, meshes: LiveMeshes, *, views: bool
    ) -> None:
        self._index = index
        self._area = area
        self._meshes = meshes
        self._views = views
        self._made: dict[int, torch.Tensor] = {}
        self._copied: dict[int, torch.Tensor] = {}

    def at(self, number: int) -> torch.Tensor:
        tensor = self._made.get(number)
        if tensor is None:
            entry = self._index.tensors[number]
            if number not in self._copied:
                (tensor,) = views_of(self._area, [entry])
                if not self._views:
                    tensor = tensor.clone() if entry.device == "cpu" else tensor.to(entry.device)
            else:
                tensor = self._copied.pop(number)
            tensor = tensor.view(element_type(entry))
            if entry.placed is not None:
                mesh = self._index.meshes[entry.placed.mesh]
                tensor = self._meshes.join(tensor, entry.placed, mesh)
            self._made[number] = tensor
        return tensor

    def copy(self, numbers: Iterable[int], threads: int) -> None:
        """Copy these to memory of their own, all at once: at() will be asked for them."""
        entries = self._index.tensors
        numbers = [number for number in numbers if entries[number].device == "cpu"]
        sources = views_of(self._area, [entries[number] for number in numbers])
        targets = [_fresh(source) for source in sources]
        pairs = zip(targets, sources, strict=True)
        do_all([partial(target.copy_, source) for target, source in pairs], threads)
        self._copied = dict(zip(numbers, targets, strict=True))


def _fresh(like: torch.Tensor) -> torch.Tensor:
    fresh = torch.empty_like(like)
    if fresh.nbytes >= HUGE_FROM_BYTES:
        prefer_huge(fresh.data_ptr(), fresh.nbytes)
    return fresh


class Reader(pickle.Unpickler):
    """Unpickles one entry and puts its tensors in."""

    def __init__(self, skeleton: bytes, at: Callable[[int], object]) -> None:
        super().__init__(io.BytesIO(skeleton))
        self._at = at

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (tensor_at.__module__, tensor_at.__name__):
            return self._at
        return super().find_class(module, name)


class Loader:
    """One shard on its way into the training objects."""

    def __init__(self, shard: Shard, threads: int = 1, *, regrown: bool = False) -> None:
        """`threads`: that copy. `regrown`: it is of a time with more or fewer replicas."""
        self._regrown = regrown
        self._threads = threads
        self._payload = shard.payload
        self._index, self._at = unpack_index(shard.payload)
        self._entries = {entry.name: entry for entry in self._index.entries}
        firsts = [entry.first for entry in self._index.entries]
        ends = [*firsts[1:], len(self._index.tensors)]
        self._ends = dict(zip(self._entries, ends, strict=True))
        self._where = f"the checkpoint of step {shard.header.step}"
        self._meshes = LiveMeshes({})

    @property
    def names(self) -> set[str]:
        """The user's entries that the shard holds."""
        return set(self._entries) - {RNG_ENTRY}

    def load(self, state: Mapping[str, Stateful]) -> None:
        """Load all entries. Raises DoesNotFit, naming the entry; some may be loaded by then."""
        missing = set(state) - self.names
        if missing:
            raise DoesNotFit(
                f"{self._where} has no {_quoted(missing)}; it has {_quoted(self.names)}: "
                "give checkpoint() the entries it was saved with, or start without checkpoint"
            )
        self._meshes = LiveMeshes(state, regrown=self._regrown)
        for name, holder in state.items():
            try:
                self._load_entry(self._entries[name], holder)
            except _MISFITS as error:
                why = " ".join(str(error).split())
                raise DoesNotFit(f"{self._where} does not fit {name!r}: {why}") from error
            except ImportError as error:
                raise DoesNotFit(f"{self._where} needs code that is gone: {error}") from error
        self.rng_setter()()

    def rng_setter(self) -> Callable[[], None]:
        """What sets the random number states again later, without the shard."""
        states = self._read_copies(self._entries[RNG_ENTRY])
        return partial(set_rng_states, states)

    def _load_entry(self, entry: StateEntry, holder: Stateful) -> None:
        if isinstance(holder, torch.nn.Module) and self._load_views(entry, holder):
            return
        loaded = self._read_copies(entry)
        holder.load_state_dict(loaded)
        optimizer = hookable(holder)
        if optimizer is not None and holder is optimizer:
            keep_dtypes(optimizer, loaded)

    def _load_views(self, entry: StateEntry, module: torch.nn.Module) -> bool:
        """Load without a copy in between. False if the module kept a view: then load copies."""
        area = self._area()
        kept = weakref.ref(area)
        loaded = self._read(entry, Tensors(self._index, area, self._meshes, views=True))
        if isinstance(loaded, Mapping):
            check_same_layout(loaded, module.state_dict())
        module.load_state_dict(loaded)
        del area, loaded
        return kept() is None

    def _read(self, entry: StateEntry, tensors: Tensors) -> Any:
        try:
            return Reader(entry.skeleton, tensors.at).load()
        except (pickle.UnpicklingError, EOFError, IndexError) as error:
            raise ShardBad(f"{self._where}: {entry.name!r} cannot be read: {error}") from error

    def _read_copies(self, entry: StateEntry) -> Any:
        tensors = self._tensors()
        tensors.copy(range(entry.first, self._ends[entry.name]), self._threads)
        return self._read(entry, tensors)

    def _tensors(self) -> Tensors:
        return Tensors(self._index, self._area(), self._meshes, views=False)

    def _area(self) -> memoryview:
        return self._payload[self._at :]


def keep_dtypes(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Undo the conversion that torch's Optimizer.load_state_dict() makes.

    It casts floating-point state to its parameter's type: an fp32 moment of a bf16 parameter would
    lose bits, and training would not continue as it was.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, values in saved.get("state", {}).items():
        if not isinstance(number, int) or not isinstance(values, dict):
            continue
        live = optimizer.state[parameters[number]]
        for name, value in _tensors_of(values):
            now = live.get(name)
            if isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                live[name] = value.to(now.device)


def _tensors_of(values: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            yield name, value


def _quoted(names: set[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names)) or "nothing"
