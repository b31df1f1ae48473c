"""Backups lie where no single eviction reaches both copies."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from everstep.core.groups import Layout, LayoutInvalid, layout_of
from everstep.core.placement import Placement, place
from everstep.model import LayoutSpec, Rank

MEGATRON = ("tp", "cp", "dp", "pp")
TORCHTITAN = ("tp", "cp", "pp", "dp")


def stated(*, ranks_per_machine: int = 1, **fields: Any) -> Layout:
    return layout_of(LayoutSpec(**fields), ranks_per_machine)


def survives(layout: Layout, placement: Placement, machines: frozenset[int]) -> bool:
    """Whether every shard has a copy outside these machines."""
    return all(
        layout.machine(Rank(owner)) not in machines or layout.machine(peer) not in machines
        for owner, peer in enumerate(placement.peers)
    )


def test_figure_9_of_the_paper() -> None:
    layout = stated(tp=2, pp=4, dp=2, ranks_per_machine=2)
    placement = place(layout)
    assert [placement.peers[rank] for rank in (8, 9)] == [2, 3]
    assert [placement.peers[rank] for rank in (2, 3)] == [8, 9]
    assert placement.uncovered == ()


def test_figure_9_in_the_other_rank_order() -> None:
    layout = stated(tp=2, pp=4, dp=2, ranks_per_machine=2, order=TORCHTITAN)
    placement = place(layout)
    assert placement.uncovered == ()
    for owner, peer in enumerate(placement.peers):
        ours, theirs = layout.coordinates(Rank(owner)), layout.coordinates(peer)
        assert ours[0] == theirs[0]
        assert ours[2] != theirs[2]
        assert ours[3] != theirs[3]


def test_groups_are_those_of_the_textbook() -> None:
    layout = stated(tp=2, dp=2, pp=2, ep=2)
    groups = list(layout.groups())
    assert ("tp", (0, 1)) in groups
    assert ("dp", (0, 2)) in groups
    assert ("pp", (0, 4)) in groups
    assert ("ep", (0, 2)) in groups
    assert len(groups) == 16


def layouts() -> list[Layout]:
    """Thousands of layouts of up to 64 ranks."""
    found = []
    sizes = itertools.product((1, 2, 4, 8), (1, 2), (1, 2, 3, 4, 8), (1, 2, 3, 4, 8))
    for (tp, cp, dp, pp), per_machine, ep, order in itertools.product(
        sizes, (1, 2, 4, 8, 16), (1, 2, 4), (MEGATRON, TORCHTITAN)
    ):
        world = tp * cp * dp * pp
        if world % per_machine or (dp * cp) % ep or world > 64 or world == per_machine:
            continue
        found.append(
            stated(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, order=order, ranks_per_machine=per_machine)
        )
    return found


def test_any_group_and_any_machine_may_go_or_the_layout_is_named() -> None:
    checked = named = 0
    for layout in layouts():
        placement = place(layout)
        assert sorted(placement.peers) == list(range(layout.world_size)), layout
        for machine in range(layout.machines):
            assert survives(layout, placement, frozenset({machine})), layout
        for name, group in layout.groups():
            if not survives(layout, placement, layout.machines_of(group)):
                assert name in placement.uncovered, layout
        if placement.uncovered:
            assert cannot_be_helped(layout), layout
            named += 1
        checked += 1
    assert checked > 2000
    assert 0 < named < checked / 2


def cannot_be_helped(layout: Layout) -> bool:
    """Whether the groups that touch some machine cover every machine: no place is left for it."""
    covered: dict[int, frozenset[int]] = {}
    for _, group in layout.groups():
        machines = layout.machines_of(group)
        for machine in machines:
            covered[machine] = covered.get(machine, frozenset()) | machines
    return any(len(machines) == layout.machines for machines in covered.values())


def test_with_one_dimension_the_next_machine_keeps_the_backup() -> None:
    layout = stated(dp=8, ranks_per_machine=2)
    placement = place(layout)
    assert placement.uncovered == ("dp",)
    assert placement.peers[:4] == (2, 3, 4, 5)
    assert placement.why == "backups lie on the next machine"


def test_known_racks_are_crossed() -> None:
    layout = stated(dp=8, ranks_per_machine=2)
    placement = place(layout, racks=["a", "a", "b", "b"])
    assert placement.peers[:2] == (4, 5)
    assert place(layout, racks=["a", "a", "a", "b"]).peers[:2] == (2, 3)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tp": 0}, "at least 1, not tp=0"),
        ({"order": ("tp", "dp")}, "must name each of tp, cp, dp, pp once"),
        ({"dp": 3, "ranks_per_machine": 2}, "3 ranks do not fill machines of 2 ranks"),
        ({"dp": 3, "ep": 2}, "ep=2 does not divide dp\\*cp=3"),
    ],
)
def test_sizes_that_describe_no_job_are_refused(fields: dict[str, int], sentence: str) -> None:
    with pytest.raises(LayoutInvalid, match=sentence):
        stated(**fields)
