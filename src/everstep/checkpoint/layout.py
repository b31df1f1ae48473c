"""Distributed tensors (DTensor: FSDP2, tensor parallel): local shards out, live tensors back in.

capture.py stores the local shard of each with what makes it part of a whole (format.Placed), and
load.py makes it a DTensor again, on the live mesh that has the same ranks. Nothing here
communicates: each rank saves and loads what it holds, and a shard of another layout is refused.
Changing the layout is the business of torch.distributed.checkpoint (export.py writes its format,
start.py reads it).

torch.distributed.tensor is imported only by scripts that use it, because it takes a second.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from everstep.checkpoint.format import MeshEntry, Placed
from everstep.model import EverstepError, Rank

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

_SPELT = re.compile(r"(R|SS?|P)(?:\((\w+)(?:,(\d+))?\))?")


class OtherLayout(EverstepError):
    """The shard is part of tensors that are cut in another way than the script's."""


class CannotPlace(EverstepError):
    """A distributed tensor of a kind that a shard cannot describe."""


def is_distributed(tensor: object) -> TypeGuard[DTensor]:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor on this rank: of a DTensor, its local shard."""
    if not is_distributed(tensor):
        return tensor
    if torch.is_grad_enabled():
        with torch.no_grad():  # with gradients, it would be a view of its own
            return local_of(tensor)
    local: Any = tensor.to_local()
    # A shard that a collective is still writing waits for it.
    whole: torch.Tensor = local.wait() if hasattr(local, "wait") else local
    return whole


# --- saving --------------------------------------------------------------------------------------


class Meshes:
    """The meshes of one rank's state, numbered as they are met, save after save."""

    def __init__(self) -> None:
        self.entries: list[MeshEntry] = []
        self._numbers: dict[DeviceMesh, int] = {}
        self._placed: dict[object, Placed] = {}

    def place(self, tensor: DTensor) -> Placed:
        """What to write beside the local shard. Raises CannotPlace."""
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        key = (tensor.device_mesh, tensor.placements, shape, stride)
        placed = self._placed.get(key)
        if placed is None:
            placed = self._placed[key] = Placed(
                mesh=self._number(tensor.device_mesh),
                placements=tuple(spell(placement) for placement in tensor.placements),
                shape=shape,
                stride=stride,
                at=_begin(tensor),
            )
        return placed

    def _number(self, mesh: DeviceMesh) -> int:
        number = self._numbers.get(mesh)
        if number is None:
            number = self._numbers[mesh] = len(self.entries)
            self.entries.append(describe(mesh))
        return number


def describe(mesh: DeviceMesh) -> MeshEntry:
    return MeshEntry(
        device=mesh.device_type,
        names=tuple(mesh.mesh_dim_names or ()),
        shape=tuple(mesh.mesh.shape),
        ranks=tuple(Rank(rank) for rank in mesh.mesh.flatten().tolist()),
    )


def spell(placement: Placement) -> str:
    """A placement as one word. Raises CannotPlace for one that is not torch's own."""
    kind = type(placement).__name__
    if kind == "Replicate":
        return "R"
    if kind == "Shard":
        return f"S({_field(placement, 'dim')})"
    if kind == "_StridedShard":
        return f"SS({_field(placement, 'dim')},{_field(placement, 'split_factor')})"
    if kind == "Partial":
        return f"P({_field(placement, 'reduce_op')})"
    raise CannotPlace(
        f"a DTensor is placed by {placement}, which checkpoints in memory do not know: "
        "save it as a plain tensor, or with torch.distributed.checkpoint"
    )


def _field(placement: Placement, name: str) -> Any:
    return getattr(placement, name)


def _begin(tensor: DTensor) -> tuple[int, ...]:
    """Where the local shard begins in the whole: torch.distributed.checkpoint asks the same way."""
    if any(placement.is_partial() for placement in tensor.placements):
        return (0,) * tensor.dim()  # a summand as large as the whole
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets)


# --- loading -------------------------------------------------------------------------------------


class LiveMeshes:
    """The meshes that the script's state lies on now."""

    def __init__(self, state: Mapping[str, Any], *, regrown: bool = False) -> None:
        """`regrown`: the shard is of a time with more or fewer replicas, and other ranks."""
        self._state = state
        self._regrown = regrown
        self._known: dict[MeshEntry, DeviceMesh] | None = None

    def join(self, local: torch.Tensor, placed: Placed, mesh: MeshEntry) -> DTensor:
        """The DTensor of which `local` is this rank's shard. Raises OtherLayout."""
        from torch.distributed.tensor import DTensor  # noqa: PLC0415 -- the script has it

        tensor = DTensor.from_local(
            local,
            self._find_regrown(mesh, placed) if self._regrown else self._find(mesh),
            [read_placement(word) for word in placed.placements],
            run_check=False,
            shape=torch.Size(placed.shape),
            stride=placed.stride,
        )
        if self._regrown and _begin(tensor) != placed.at:
            raise OtherLayout(
                f"it is another part of a tensor of {list(placed.shape)} than this rank has: the"
                " state is not replicated (give --elastic-sharded)"
            )
        return tensor

    def _find_regrown(self, wanted: MeshEntry, placed: Placed) -> DeviceMesh:
        """A mesh that differs in its ranks, and in the size of dimensions that replicate."""
        if self._known is None:
            self._known = self._live()
        for mesh, live in self._known.items():
            alike = (mesh.device, mesh.names) == (wanted.device, wanted.names)
            sizes = zip(mesh.shape, wanted.shape, placed.placements, strict=False)
            if alike and all(now == then or word == "R" for now, then, word in sizes):
                return live
        return self._find(wanted)

    def _find(self, wanted: MeshEntry) -> DeviceMesh:
        if self._known is None:
            self._known = self._live()
        live = self._known
        if wanted in live:
            return live[wanted]
        have = ", ".join(map(shown, live)) or "no distributed tensors"
        raise OtherLayout(f"it was saved on {shown(wanted)}, but the script now has {have}")

    def _live(self) -> dict[MeshEntry, DeviceMesh]:
        meshes = {
            tensor.device_mesh
            for holder in self._state.values()
            for tensor in _tensors_of(holder)
            if is_distributed(tensor)
        }
        return {describe(mesh): mesh for mesh in meshes}


def _tensors_of(holder: Any) -> Iterable[Any]:
    if isinstance(holder, torch.nn.Module):
        yield from holder.parameters()
        yield from holder.buffers()
    elif isinstance(holder, torch.optim.Optimizer):
        yield from tensors_in([group["params"] for group in holder.param_groups])
    else:
        yield from tensors_in(holder.state_dict())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def read_placement(word: str) -> Placement:
    """The placement that spell() wrote."""
    from torch.distributed.tensor import Partial, Replicate, Shard  # noqa: PLC0415 -- see above

    found = _SPELT.fullmatch(word)
    if found is None:
        raise OtherLayout(f"its placement {word!r} was written by a newer everstep")
    kind, first, second = found.groups()
    if kind == "R":
        return Replicate()
    if kind == "P":
        return Partial(first)
    if kind == "S":
        return Shard(int(first))
    from torch.distributed.tensor.placement_types import _StridedShard  # noqa: PLC0415

    strided: Placement = _StridedShard(int(first), split_factor=int(second))
    return strided


def check_same_layout(saved: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    """Raises OtherLayout if a tensor is cut in another way than the live one of the same name.

    Copying between them would communicate, and mean something else on every rank.
    """
    for name, value in saved.items():
        now = live.get(name)
        if not (isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor)):
            continue
        if _layout(value) != _layout(now):
            raise OtherLayout(
                f"{name} was saved as {_cut(value)}, but the script now has {_cut(now)}"
            )


def _layout(tensor: torch.Tensor) -> object:
    if not is_distributed(tensor):
        return None
    return tensor.device_mesh, tensor.placements, tensor.shape


def _cut(tensor: torch.Tensor) -> str:
    if not is_distributed(tensor):
        return "a plain tensor"
    words = ", ".join(spell(placement) for placement in tensor.placements)
    return f"{list(tensor.shape)} placed as {words} on {shown(describe(tensor.device_mesh))}"


def shown(mesh: MeshEntry) -> str:
    """For people: "a mesh of dp=2, tp=2 with ranks 0 to 3"."""
    names = mesh.names or tuple(str(number) for number in range(len(mesh.shape)))
    sizes = ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))
    return f"a {mesh.device} mesh of {sizes} with ranks {', '.join(map(str, mesh.ranks))}"
