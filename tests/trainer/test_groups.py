"""What a rank shows of the layout: meshes and process groups in a few numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from everstep.agent.groups import read_groups
from everstep.model import Generation, GroupShape, SeenGroups
from everstep.trainer import groups
from everstep.trainer.groups import RankGroups, seen_here
from tests.trainer.surroundings import Surroundings


class Mesh:
    """As much of a DeviceMesh as is looked at."""

    def __init__(self, table: list[object], *names: str) -> None:
        self.mesh = torch.tensor(table)
        self.mesh_dim_names = names or None


def shapes(*found: tuple[str, int, int]) -> tuple[GroupShape, ...]:
    return tuple(GroupShape(name=name, factors=((stride, size),)) for name, stride, size in found)


@pytest.mark.parametrize(
    ("mesh", "found"),
    [
        (Mesh([[0, 1], [2, 3]], "dp", "tp"), shapes(("tp", 1, 2), ("dp", 2, 2))),
        (Mesh([[0, 2], [1, 3]], "dp", "tp"), shapes(("dp", 1, 2), ("tp", 2, 2))),
        (Mesh([[[0], [1]], [[2], [3]]], "pp", "dp", "cp"), shapes(("dp", 1, 2), ("pp", 2, 2))),
        (Mesh([0, 1, 2, 3]), shapes(("", 1, 4))),
    ],
)
def test_a_mesh_is_a_stride_and_a_size_for_each_dimension(
    mesh: Mesh, found: tuple[GroupShape, ...]
) -> None:
    seen = seen_here(mesh, 4)
    assert (seen.mesh, seen.mesh_problem) == (found, "")


@pytest.mark.parametrize(
    ("mesh", "problem"),
    [
        (Mesh([0, 1], "tp"), "it has 2 of 4 ranks: give the whole mesh, not a part"),
        (
            Mesh([[0, 1], [3, 2]], "dp", "tp"),
            "its ranks are in an order of their own: rank 2 is at",
        ),
    ],
)
def test_a_mesh_that_tells_nothing_is_said_to(mesh: Mesh, problem: str) -> None:
    seen = seen_here(mesh, 4)
    assert seen.mesh == ()
    assert seen.mesh_problem.startswith(problem)


def test_a_machine_tells_what_all_its_ranks_told_of_this_generation(tmp_path: Path) -> None:
    def tell(local_rank: int, name: str, generation: int) -> None:
        seen = SeenGroups(groups=shapes((name, 1, 2)))
        told = RankGroups(generation=Generation(generation), seen=seen)
        groups.tell(tmp_path, local_rank, told)

    tell(0, "tp", 2)
    assert read_groups(tmp_path, 2, Generation(2)) is None
    tell(1, "tp", 1)
    assert read_groups(tmp_path, 2, Generation(2)) is None
    tell(1, "tp", 2)
    assert read_groups(tmp_path, 2, Generation(2)) == SeenGroups(groups=shapes(("tp", 1, 2)))


def test_a_rank_tells_once_and_a_mesh_that_is_none_costs_nothing_else(
    here: Surroundings, capsys: pytest.CaptureFixture[str]
) -> None:
    run = here.run()
    run.mesh = object()
    assert list(run.steps(stop=3)) == [0, 1, 2]
    assert here.beat().step == 2
    assert read_groups(here.shm, 1, Generation(1)) is None
    assert capsys.readouterr().err.count("look at process groups is off") == 1

    assert list(here.run(generation=2).steps(stop=1)) == [0]
    assert read_groups(here.shm, 1, Generation(2)) == SeenGroups()
