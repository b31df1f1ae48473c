"""Layouts are read off the groups of a running job, and compared with what was stated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from everstep.core.groups import Factors, Layout, layout_of
from everstep.core.seen import NoGrid, difference, infer, shape_of
from everstep.model import GroupShape, LayoutSpec

Shapes = list[tuple[str, Factors]]

NAMES = ("tp", "cp", "dp_shard", "dp_replicate", "pp", "")


def factorizations(number: int) -> Iterator[tuple[int, ...]]:
    """All ways to write it as a product of sizes above 1, in every order."""
    if number == 1:
        yield ()
    for size in range(2, number + 1):
        if number % size == 0:
            for rest in factorizations(number // size):
                yield (size, *rest)


def members(sizes: tuple[int, ...], along: frozenset[int], rank: int) -> list[int]:
    """The group of this rank: all ranks that differ from it in these dimensions only."""
    own, strides = [], list(itertools.accumulate(sizes, initial=1, func=int.__mul__))
    for stride, size in zip(strides, sizes, strict=False):
        own.append(rank // stride % size)
    choices = (range(n) if at in along else (own[at],) for at, n in enumerate(sizes))
    found = [
        sum(c * stride for c, stride in zip(place, strides, strict=False))
        for place in itertools.product(*choices)
    ]
    return sorted(found)


def seen(shapes: Shapes, world: int) -> Layout:
    listed = [GroupShape(name=name, factors=factors) for name, factors in shapes]
    return infer(listed, world, ranks_per_machine=1)


def stated(**fields: Any) -> Layout:
    return layout_of(LayoutSpec(**fields))


def test_every_layout_of_up_to_64_ranks_is_read_off_its_groups() -> None:
    rng = Random(3)  # which rank looks, in which order
    checked = 0
    for world in range(2, 65):
        for sizes in factorizations(world):
            names = rng.sample(NAMES, len(sizes))
            found: Shapes = []
            for at, name in enumerate(names):
                ranks = members(sizes, frozenset({at}), rng.randrange(world))
                factors = shape_of(ranks)
                assert factors == ((math.prod(sizes[:at]), sizes[at]),)
                found.append((name, factors))
            two = shape_of(members(sizes, frozenset({0, len(sizes) - 1}), rng.randrange(world)))
            assert two is not None
            found += [("", two), ("default_pg", ((1, world),))]
            rng.shuffle(found)
            if len(sizes) == 1 and names == [""]:
                continue
            layout = seen(found, world)
            assert layout.sizes() == sizes
            assert [d.name for d in layout.dimensions] == names
            assert len(layout.shapes) == len(sizes)
            checked += 1
    assert checked > 400


def test_all_ranks_of_all_groups_see_the_same_shape() -> None:
    for sizes in ((2, 3, 4), (4, 2, 2, 2), (3, 5)):
        for along in itertools.chain.from_iterable(
            itertools.combinations(range(len(sizes)), count) for count in range(len(sizes) + 1)
        ):
            shapes = {
                shape_of(members(sizes, frozenset(along), r)) for r in range(math.prod(sizes))
            }
            assert len(shapes) == 1
            assert None not in shapes


@pytest.mark.parametrize(
    "ranks",
    [[0, 1, 3], [1, 2], [0, 3, 4, 8], [2, 3, 4, 5], [0, 1, 1 << 20, (1 << 20) + 2]],
    ids=str,
)
def test_a_group_without_a_shape_has_none(ranks: list[int]) -> None:
    assert shape_of(ranks) is None


def test_groups_that_form_no_grid_are_said_to_form_none() -> None:
    with pytest.raises(NoGrid, match="multiples of 2, some at multiples of 3"):
        seen([("", ((1, 2),)), ("", ((1, 3),))], 6)
    with pytest.raises(NoGrid, match="only group is that of all ranks"):
        seen([("default_pg", ((1, 4),))], 4)


def test_megatrons_groups_are_understood_by_their_names() -> None:
    layout = seen(
        [
            ("TENSOR_MODEL_PARALLEL_GROUP", ((1, 2),)),
            ("DATA_PARALLEL_GROUP", ((2, 4),)),
            ("MODEL_PARALLEL_GROUP", ((1, 2), (8, 4))),
            ("PIPELINE_MODEL_PARALLEL_GROUP", ((8, 4),)),
            ("EXPERT_MODEL_PARALLEL_GROUP", ((2, 2),)),
            ("EMBEDDING_GROUP", ((24, 2),)),
        ],
        32,
    )
    assert layout.sizes() == (2, 2, 2, 4)
    kinds = {shape.name: shape.factors for shape in layout.shapes}
    assert kinds.keys() == {
        "TENSOR_MODEL_PARALLEL_GROUP",
        "DATA_PARALLEL_GROUP",
        "PIPELINE_MODEL_PARALLEL_GROUP",
        "EXPERT_MODEL_PARALLEL_GROUP",
    }
    assert difference(stated(tp=2, dp=4, pp=4, ep=2), layout) == ""
    assert "has 2 ranks, not 4" in difference(stated(tp=2, dp=4, pp=4, ep=4), layout)


def test_a_dimension_that_no_group_shows_is_still_there() -> None:
    layout = seen([("mesh_tp", ((1, 2),))], 8)
    assert [(d.name, d.size) for d in layout.dimensions] == [("tp", 2), ("", 4)]
    assert [shape.name for shape in layout.shapes] == ["tp"]


@pytest.mark.parametrize(
    "shapes",
    [
        [("tp", ((1, 2),)), ("dp", ((2, 4),)), ("pp", ((8, 2),))],
        [("tp", ((1, 2),)), ("dp_shard", ((2, 2),)), ("dp_replicate", ((4, 2),))],
        [("", ((1, 2),)), ("", ((2, 4),))],
        [("mesh_pp", ((8, 2),))],
    ],
)
def test_what_is_only_finer_or_vaguer_is_no_difference(
    shapes: Shapes,
) -> None:
    assert difference(stated(tp=2, dp=4, pp=2), seen(shapes, 16)) == ""


@pytest.mark.parametrize(
    ("shapes", "clause"),
    [
        ([("tp", ((1, 4),))], "tp of 4 ranks lies along tp and dp"),
        ([("dp", ((1, 2),)), ("tp", ((2, 4),))], "dp of 2 ranks lies along tp"),
        ([("", ((1, 4),)), ("", ((4, 4),))], "an unnamed group of 4 ranks is tp and dp together"),
        ([("x", ((2, 8),)), ("y", ((1, 2),))], "x of 8 ranks is dp and pp together"),
    ],
)
def test_what_cannot_be_is_a_difference(shapes: Shapes, clause: str) -> None:
    assert difference(stated(tp=2, dp=4, pp=2), seen(shapes, 16)) == clause


def test_fsdp_over_data_and_context_parallelism_is_no_difference() -> None:
    layout = seen([("tp", ((1, 2),)), ("cp", ((2, 2),)), ("mesh_fsdp", ((2, 4),))], 8)
    assert difference(stated(tp=2, cp=2, dp=2), layout) == ""
