"""Any state through a shard and back: bit for bit, and in memory of its own."""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from everstep.checkpoint.capture import CannotSave, Capture, dense_stride
from everstep.checkpoint.format import Shard, ShardBad, tensor_at
from everstep.checkpoint.guard import Guard
from everstep.checkpoint.load import DoesNotFit, Loader
from everstep.model import Step
from tests.checkpoint.objects import (
    DTYPES,
    Box,
    of_dtype,
    same_bits,
    shard_of,
    snapshot_of,
    through_a_shard,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_type_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    tensor = of_dtype(dtype)
    back = through_a_shard({"x": [tensor]})["x"][0]
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


NAN_BITS = torch.tensor([0x7FC00001, 0x7F800000, -1, 1], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(3.5),
        lambda: torch.empty(0),
        lambda: torch.empty(3, 0, 2, dtype=torch.bfloat16),
        lambda: torch.randn(4, 5).t(),
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(10)[::3],
        lambda: torch.randn(6, 8)[1:4, 2:5],
        lambda: torch.randn(3, 1).expand(3, 7),
        lambda: torch.randn(1, 4, 1).transpose(0, 2),
        lambda: torch.randn(3, dtype=torch.complex64).conj(),
        lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
        lambda: torch.randn(3, requires_grad=True) * 2,
        lambda: NAN_BITS,
    ],
)
def test_every_layout_comes_back_bit_for_bit(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    back = through_a_shard((tensor,))[0]
    assert same_bits(back, tensor.detach())
    assert not back.requires_grad


def test_dense_strides_are_kept_because_kernels_choose_by_them() -> None:
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert through_a_shard(tensor).stride() == tensor.stride()
    assert through_a_shard(torch.randn(4, 5).t()).stride() == (1, 5)


@pytest.mark.parametrize(
    ("shape", "stride", "kept"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), True),
        ((2, 3), (4, 1), False),
        ((2, 3), (0, 1), False),
        ((1, 3), (99, 1), True),
        ((), (), True),
        ((2, 2), (1, 1), False),
    ],
)
def test_strides_with_gaps_or_overlaps_become_contiguous(
    shape: tuple[int, ...], stride: tuple[int, ...], kept: bool
) -> None:
    assert (dense_stride(shape, stride) == stride) is kept


@dataclasses.dataclass
class Position:
    shard: int
    seen: torch.Tensor


def test_python_objects_of_any_nesting_come_back() -> None:
    state = {
        "counts": collections.Counter("abc"),
        "deque": collections.deque([1, torch.ones(2)], maxlen=3),
        "position": Position(3, torch.arange(4)),
        "ordered": collections.OrderedDict(a=(1, {"b": {2, 3}}), z=None),
        "numpy": np.arange(5),
        7: b"bytes",
    }
    back = through_a_shard(state)
    assert back["counts"] == state["counts"]
    assert back["deque"].maxlen == 3
    assert torch.equal(back["position"].seen, torch.arange(4))
    assert list(back["ordered"]) == ["a", "z"]
    assert back["numpy"].tolist() == [0, 1, 2, 3, 4]
    assert back[7] == b"bytes"


def test_tensors_that_are_not_plain_memory_come_back_too() -> None:
    sparse = torch.eye(3).to_sparse()
    meta = torch.empty(2, device="meta")
    back = through_a_shard([sparse, meta])
    assert torch.equal(back[0].to_dense(), torch.eye(3))
    assert back[1].device.type == "meta"


def test_the_same_tensor_is_stored_once_and_comes_back_as_one() -> None:
    shared = torch.randn(1000)
    value = {"a": shared, "b": [shared, shared.detach()], "other": torch.randn(1000)}
    snapshot = snapshot_of({"it": Box(value)})
    assert sum(entry.nbytes == 4000 for entry in snapshot.tensors) == 2
    box = Box()
    Loader(shard_of(snapshot)).load({"it": box})
    assert box.value["a"] is box.value["b"][0] is box.value["b"][1]


def test_tied_weights_are_stored_once() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(8, 8), "b": torch.nn.Linear(8, 8)})
    model["b"].weight = model["a"].weight
    snapshot = snapshot_of({"model": model})
    assert sum(entry.nbytes == 256 for entry in snapshot.tensors) == 1


class Summed:
    """Looks at its tensor while it is being unpickled."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __setstate__(self, state: dict[str, torch.Tensor]) -> None:
        self.tensor = state["tensor"]
        self.total = float(self.tensor.sum())


@pytest.mark.parametrize("threads", [1, 3])
def test_tensors_are_complete_before_anything_looks_at_them(threads: int) -> None:
    shared = torch.ones(2_000_000)  # large enough for huge pages
    state = {
        "none": Box(),
        "many": Box([torch.full((number,), 1.5) for number in range(9)]),
        "nothing": Box(),
        "shared": Box([Summed(shared), shared]),
        "again": Box(Summed(shared)),
    }
    fresh = {name: Box() for name in state}
    shard = shard_of(snapshot_of(state))
    Loader(shard, threads).load(fresh)
    scribble(shard)
    assert [part.tolist() for part in fresh["many"].value] == [[1.5] * n for n in range(9)]
    first, second = fresh["shared"].value
    assert first.tensor is second
    for found in (first, fresh["again"].value):
        assert found.total == 2_000_000
        assert same_bits(found.tensor, shared)
    assert (fresh["none"].value, fresh["nothing"].value) == (None, None)


def test_random_numbers_go_on_where_they_were() -> None:
    random.random()
    torch.rand(3)
    shard = shard_of(snapshot_of({}))
    drawn = draw()
    random.seed(1)
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002 -- the generator that scripts share
    assert draw() != drawn
    Loader(shard).load({})
    assert draw() == drawn


def draw() -> list[object]:
    shared = np.random.rand(3)  # noqa: NPY002 -- the generator that scripts share
    return [random.random(), torch.rand(5).tolist(), shared.tolist()]


# --- what is copied when -------------------------------------------------------------------------


def trained() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_what_only_the_optimizer_changes_stays_in_place_and_the_rest_is_copied() -> None:
    state = trained()
    model = state["model"]
    snapshot = snapshot_of(state)
    with torch.no_grad():
        model[1].running_mean += 100.0
    assert snapshot.watch.changed_entry() is None
    addresses = {source.data_ptr() for source in snapshot.sources}
    moments = [t for values in state["optimizer"].state.values() for t in values.values()]
    assert addresses >= {t.data_ptr() for t in (*model.parameters(), *moments)}
    assert not addresses & {buffer.data_ptr() for buffer in model.buffers()}
    fresh = trained()
    Loader(shard_of(snapshot)).load(fresh)
    assert float(fresh["model"][1].running_mean.max()) < 50


def test_a_changed_parameter_is_noticed_and_its_entry_named() -> None:
    state = trained()
    snapshot = snapshot_of(state)
    with torch.no_grad():
        state["model"][0].weight.mul_(2)
    assert snapshot.watch.changed_entry() == "model"


def test_parameters_that_no_optimizer_owns_are_copied_at_once() -> None:
    average = torch.nn.Linear(4, 4)
    state = trained() | {"average": average}
    snapshot = snapshot_of(state)
    before = average.weight.detach().clone()
    with torch.no_grad():
        average.weight.zero_()
    fresh = trained() | {"average": torch.nn.Linear(4, 4)}
    Loader(shard_of(snapshot)).load(fresh)
    assert torch.equal(fresh["average"].weight, before)


def test_a_later_save_sees_tensors_that_came_went_and_moved() -> None:
    box = Box({"a": torch.ones(3), "b": torch.zeros(2)})
    capture = Capture({"it": box}, Guard({"it": box}, explicit_wait=False))
    for value in (
        box.value,
        {"a": torch.ones(3)},
        {"new": torch.full((5,), 7.0), "a": torch.ones(3)},
        {"a": torch.ones(3, dtype=torch.int64), "b": torch.ones(2, 2).t()},
    ):
        box.value = value
        back = Box()
        Loader(shard_of(capture.snapshot(Step(1)))).load({"it": back})
        assert back.value.keys() == value.keys()
        assert all(same_bits(back.value[name], value[name]) for name in value)


def test_a_tensor_that_grows_moves_those_after_it_in_the_shard() -> None:
    after = torch.arange(100.0)
    box = Box([torch.ones(3), after])
    capture = Capture({"it": box}, Guard({"it": box}, explicit_wait=False))
    for size in (3, 1000, 1000, 2):
        box.value = [torch.ones(size), after]
        back = Box()
        Loader(shard_of(capture.snapshot(Step(1)))).load({"it": back})
        assert all(same_bits(*pair) for pair in zip(back.value, box.value, strict=True))


# --- loading -------------------------------------------------------------------------------------


def test_a_module_is_loaded_in_place_and_keeps_no_memory_of_the_shard() -> None:
    state = trained()
    shard = shard_of(snapshot_of(state))
    fresh = trained()
    addresses = [parameter.data_ptr() for parameter in fresh["model"].parameters()]
    Loader(shard).load(fresh)
    scribble(shard)
    for live, old in zip(
        fresh["model"].state_dict().values(), state["model"].state_dict().values(), strict=True
    ):
        assert same_bits(live, old)
    assert [parameter.data_ptr() for parameter in fresh["model"].parameters()] == addresses
    for index, values in state["optimizer"].state_dict()["state"].items():
        for name, value in values.items():
            assert same_bits(fresh["optimizer"].state_dict()["state"][index][name], value)


class Counting(torch.nn.Linear):
    loads = 0

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.loads += 1
        return super().load_state_dict(*args, **kwargs)


def test_a_plain_module_is_loaded_once_straight_from_the_shard() -> None:
    shard = shard_of(snapshot_of({"model": torch.nn.Linear(3, 3)}))
    fresh = Counting(3, 3)
    Loader(shard).load({"model": fresh})
    assert fresh.loads == 1


class Keeper(torch.nn.Module):
    """Keeps the very tensors that it is given, as some quantizers do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0))

    def load_state_dict(self, state: Any, *_: Any, **__: Any) -> None:  # type: ignore[override]
        self.table = state["table"]


def test_a_module_that_keeps_what_it_is_given_gets_a_copy_of_its_own() -> None:
    shard = shard_of(snapshot_of({"model": Keeper()}))
    fresh = Keeper()
    Loader(shard).load({"model": fresh})
    scribble(shard)
    assert fresh.table.tolist() == [0.0, 1.0, 2.0, 3.0]


def scribble(shard: Shard) -> None:
    """What the next save but three does to the slot."""
    shard.payload[:] = b"\xff" * len(shard.payload)


def test_fp32_state_of_bf16_parameters_keeps_its_bits() -> None:
    """torch's own load_state_dict() rounds it to bf16."""

    def make() -> torch.optim.Optimizer:
        parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([parameter], momentum=0.9)
        optimizer.state[parameter]["momentum_buffer"] = torch.full((3,), 1.0009765625)
        return optimizer

    shard = shard_of(snapshot_of({"optimizer": make()}))
    fresh = make()
    Loader(shard).load({"optimizer": fresh})
    (state,) = fresh.state.values()
    assert state["momentum_buffer"].dtype == torch.float32
    assert state["momentum_buffer"].tolist() == [1.0009765625] * 3


def test_another_model_is_refused_with_its_name() -> None:
    shard = shard_of(snapshot_of({"net": torch.nn.Linear(3, 3)}))
    with pytest.raises(DoesNotFit, match=r"step 5 does not fit 'net': .*size mismatch"):
        Loader(shard).load({"net": torch.nn.Linear(4, 4)})
    with pytest.raises(DoesNotFit, match="has no 'optimizer'; it has 'net'"):
        Loader(shard).load({"net": torch.nn.Linear(3, 3), "optimizer": Box()})


def test_an_index_that_points_outside_is_refused() -> None:
    shard = shard_of(snapshot_of({"it": Box(torch.ones(100))}))
    shard.payload = shard.payload[:-4096]
    with pytest.raises(ShardBad, match="points beyond"):
        Loader(shard)
    shard.payload[:16] = b"\xff" * 16
    with pytest.raises(ShardBad, match="cannot be read"):
        Loader(shard)


def test_a_skeleton_alone_cannot_be_loaded() -> None:
    with pytest.raises(ShardBad, match="only be loaded together"):
        tensor_at(3)


# --- what cannot be saved ------------------------------------------------------------------------


def test_what_does_not_pickle_is_named() -> None:
    with pytest.raises(CannotSave, match="'it' cannot be saved"):
        snapshot_of({"it": Box(lambda: None)})


class HomeMade:
    """An optimizer that knows nothing of torch.optim."""

    def step(self) -> None: ...
    def zero_grad(self) -> None: ...
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


class Wrapper(HomeMade):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def test_an_optimizer_without_hooks_is_refused_with_what_to_do() -> None:
    with pytest.raises(CannotSave, match=r"HomeMade.*ckpt\.wait\(\).*explicit_wait=True"):
        Guard({"optimizer": HomeMade()}, explicit_wait=False)
    model = torch.nn.Linear(2, 2)
    guard = Guard({"model": model, "optimizer": HomeMade()}, explicit_wait=True)
    assert guard.pointers() == {parameter.data_ptr() for parameter in model.parameters()}


def test_a_wrapper_is_hooked_through_the_optimizer_that_it_wraps() -> None:
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters())
    guard = Guard({"optimizer": Wrapper(inner)}, explicit_wait=False)
    waits: list[int] = []
    guard.install(lambda: waits.append(1))
    inner.step()
    assert waits == [1]
    assert guard.pointers() == {parameter.data_ptr() for parameter in model.parameters()}
