"""From live training objects to a payload: what of it is copied at once, and what may wait.

Called by Run.checkpoint()'s save, on the training thread, between two optimizer steps. A state dict
of any shape goes through a pickler that takes the tensors out; Python objects are therefore frozen
at once, and the tensors are split in two: those that only a hooked optimizer changes are left in
place for the copy thread (copier.py), all others are copied here and now.

A tensor is stored as its elements in memory order, with its strides, so that channels_last and
transposed tensors come back as they were. Tensors that are the same memory are stored once.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch

from everstep.checkpoint import slices
from everstep.checkpoint.format import (
    Placed,
    ShardIndex,
    StateEntry,
    TensorEntry,
    pack_index,
    padded,
    tensor_at,
)
from everstep.checkpoint.layout import CannotPlace, Meshes, is_distributed, local_of
from everstep.checkpoint.naming import Names, kind_of
from everstep.checkpoint.replicas import Replicas
from everstep.checkpoint.rng import RNG_ENTRY, rng_states
from everstep.model import EverstepError, Rank, Step

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_ONE_BYTE_VIEWS = frozenset(
    getattr(torch, name)
    for name in ("bit", *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)))
    if hasattr(torch, name)
)
"""Element types that torch cannot copy, but can view as bytes."""

_Place = tuple[int, torch.dtype, torch.Size, tuple[int, ...], torch.device, Placed | None]
"""Two tensors of the same place are the same tensor."""


class CannotSave(EverstepError):
    """The state holds something that a checkpoint in memory cannot hold."""


class Stateful(Protocol):
    """What the dictionary given to Run.checkpoint() may hold."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def version_of(tensor: torch.Tensor) -> int:
    """Autograd's count of in-place changes, shared by all tensors that are the same memory."""
    return tensor._version  # noqa: SLF001 -- documented under this name only


class Watch:
    """Tensors that stay in place until they are copied, and the versions they must have then."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._owners: list[str] = []

    def add(self, tensor: torch.Tensor, owner: str) -> None:
        self._tensors.append(tensor)
        self._versions.append(version_of(tensor))
        self._owners.append(owner)

    def changed_entry(self) -> str | None:
        """Name of an entry of which a tensor has changed; None if none has."""
        for number, tensor in enumerate(self._tensors):
            if version_of(tensor) != self._versions[number]:
                return self._owners[number]
        return None


class Snapshot:
    """One save: frozen Python objects, and tensors that are frozen or watched."""

    def __init__(self, step: Step, index: ShardIndex, sources: list[torch.Tensor]) -> None:
        self.step = step
        self.head = pack_index(index)
        self._index = index
        self.tensors = index.tensors
        self.sources = sources
        self.watch = Watch()
        size = max((entry.offset + entry.nbytes for entry in index.tensors), default=0)
        self.payload_bytes = len(self.head) + size

    def backup_bytes(self, rank: Rank) -> int:
        """About what a peer of this rank will keep of it."""
        return slices.part_bytes(self._index, self.payload_bytes, rank)


class Stage:
    """Copies made at once. CPU memory is used again by the next save, so it is faulted in once."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []
        self._next = 0

    def rewind(self) -> None:
        """The previous save's copies are written: reuse their memory."""
        self._next = 0

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cuda:
            # Queued on the training stream, like the work that will change the tensor next.
            return tensor.clone()
        if self._next == len(self._kept):
            self._kept.append(torch.empty(0))
        kept = self._kept[self._next]
        if (kept.dtype, kept.shape, kept.stride()) != (tensor.dtype, tensor.shape, tensor.stride()):
            kept = self._kept[self._next] = torch.empty_like(tensor)
        self._next += 1
        return kept.copy_(tensor)


class Collector(pickle.Pickler):
    """Pickles one entry and takes its tensors out into a table shared by all entries."""

    def __init__(self, file: io.BytesIO, table: Table) -> None:
        super().__init__(file, protocol=5)
        self._table = table

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            number = self._table.add(obj)
            if number is not None:
                return tensor_at, (number,)
        return NotImplemented


class Table:
    """The tensors of one save, in the order in which the pickler meets them.

    Most saves hold the same tensors at the same addresses as the one before, whose entries are then
    taken over: that halves the time that training waits for a save of thousands of tensors.
    """

    def __init__(self, previous: Table | None, meshes: Meshes, replicas: Replicas) -> None:
        self.entries: list[TensorEntry] = []
        self.tensors: list[torch.Tensor] = []
        self.wholes: list[torch.Tensor] = []
        """The same, but each DTensor itself: it counts its changes, and its shard does not."""
        self.places: list[_Place] = []
        self.owners: list[str] = []
        self.owner = ""
        self._meshes = meshes
        self._replicas = replicas
        self._previous = None if previous is None else (previous.places, previous.entries)
        self._end = 0
        self._known: dict[_Place, int] = {}

    def add(self, tensor: torch.Tensor) -> int | None:
        """Its number, or None if it is to be pickled like any other object."""
        whole, placed = tensor, None
        if is_distributed(tensor):
            placed = self._meshes.place(tensor)
            tensor = local_of(tensor)
        if not _storable(tensor):
            return None
        tensor = _plain_memory(tensor)
        place = (
            tensor.data_ptr(),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.device,
            placed,
        )
        number = self._known.get(place) if place[0] else None
        if number is None:
            number = len(self.tensors)
            self._known[place] = number
            self.wholes.append(whole)
            self._append(tensor, place)
        return number

    def _append(self, tensor: torch.Tensor, place: _Place) -> None:
        entry = self._same_as_before(place)
        if entry is None:
            entry = _entry_of(tensor, padded(self._end), place[-1])
            entry = msgspec.structs.replace(
                entry, replicas=self._replicas.of(self.wholes[-1], entry.nbytes)
            )
            self._previous = None  # offsets after this one may differ
        self.entries.append(entry)
        self.places.append(place)
        self.owners.append(self.owner)
        sub_byte = tensor.dtype in _ONE_BYTE_VIEWS
        self.tensors.append(tensor.view(torch.uint8) if sub_byte else tensor)
        self._end = entry.offset + entry.nbytes

    def _same_as_before(self, place: _Place) -> TensorEntry | None:
        if self._previous is None:
            return None
        places, entries = self._previous
        number = len(self.entries)
        return entries[number] if number < len(places) and places[number] == place else None


class Guarded(Protocol):
    """What must not change before it was copied: guard.py sees to that."""

    owners: set[str]

    def pointers(self) -> set[int]: ...


class Capture:
    """Takes snapshots of one state, save after save."""

    def __init__(self, state: Mapping[str, Stateful], guarded: Guarded) -> None:
        self._state = state
        self._guarded = guarded
        self._stage = Stage()
        self._table: Table | None = None
        self._meshes = Meshes()
        self._names = Names(state)
        self._replicas = Replicas(state)

    def snapshot(self, step: Step) -> Snapshot:
        """Freeze everything but the guarded tensors, which are watched. Raises CannotSave.

        The previous snapshot must have been copied: its memory is used again.
        """
        self._replicas.begin()
        table = self._table = Table(self._table, self._meshes, self._replicas)
        entries = []
        for name, read in _readers(self._state):
            table.owner = name
            entries.append(
                StateEntry(
                    name=name,
                    first=len(table.entries),
                    skeleton=_pickle(name, read, table),
                    kind=kind_of(self._state.get(name)),
                    names=self._names.of(name),
                )
            )
        index = ShardIndex(
            entries=tuple(entries),
            tensors=tuple(table.entries),
            meshes=tuple(self._meshes.entries),
            replicas=tuple(self._replicas.sets),
        )
        snapshot = Snapshot(step, index, table.tensors)
        self._stage.rewind()
        self._split(table, snapshot)
        return snapshot

    def _split(self, table: Table, snapshot: Snapshot) -> None:
        pointers, owners = self._guarded.pointers(), self._guarded.owners
        for number, tensor in enumerate(table.tensors):
            owner = table.owners[number]
            still = table.places[number][0] in pointers or owner in owners
            if still and not tensor.is_inference():  # those have no version to watch
                snapshot.watch.add(table.wholes[number], owner)
            elif tensor.numel():
                snapshot.sources[number] = self._stage.take(tensor)
        table.tensors, table.wholes = [], []


def _readers(state: Mapping[str, Stateful]) -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, holder in state.items():
        yield name, holder.state_dict
    yield RNG_ENTRY, rng_states


def _pickle(name: str, read: Callable[[], Any], table: Table) -> bytes:
    file = io.BytesIO()
    try:
        value = read()
        with torch.no_grad():
            Collector(file, table).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, CannotPlace) as error:
        raise CannotSave(f"the state of {name!r} cannot be saved: {error}") from error
    return file.getvalue()


def _storable(tensor: torch.Tensor) -> bool:
    """Sparse, quantized, meta and nested tensors pickle themselves, at once. So do subclasses."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout == torch.strided
        and (tensor.is_cpu or tensor.is_cuda)
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def _plain_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without autograd history; lazy conjugates and negatives are computed."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor


def _entry_of(tensor: torch.Tensor, offset: int, placed: Placed | None) -> TensorEntry:
    shape = tuple(tensor.shape)
    return TensorEntry(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=shape,
        stride=dense_stride(shape, tensor.stride()),
        offset=offset,
        nbytes=tensor.numel() * tensor.element_size(),
        device=tensor.device.type,
        placed=placed,
    )


def dense_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The strides if they place the elements without gap and overlap, else the contiguous ones."""
    expected = 1
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda pair: pair[::-1]):
        if size == 1:
            continue
        if step != expected:
            return contiguous_stride(shape)
        expected *= size
    return tuple(stride)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))


def views_of(area: memoryview, tensors: Sequence[TensorEntry]) -> list[torch.Tensor]:
    """Where the tensors' elements go in this memory, or come from, ready for copy_().

    Element types that torch cannot copy are views of bytes here.
    """
    return [_view(area, entry) for entry in tensors]


def element_type(entry: TensorEntry) -> torch.dtype:
    found: torch.dtype = getattr(torch, entry.dtype)
    return found


def _view(area: memoryview, entry: TensorEntry) -> torch.Tensor:
    dtype = element_type(entry)
    if dtype in _ONE_BYTE_VIEWS:
        dtype = torch.uint8
    if entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=dtype)
    flat = torch.frombuffer(area, dtype=torch.uint8, count=entry.nbytes, offset=entry.offset)
    return flat.view(dtype).as_strided(entry.shape, entry.stride)
