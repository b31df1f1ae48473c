"""Votes about slow training: whom rounds of looks name, and that noise names nobody."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from everstep.core.aggregate import flagged
from everstep.core.group_of import count
from everstep.core.groups import Layout
from everstep.core.slowness import by_chance
from tests.core.shown import layout, taken

ROUNDS = 5
GRID = layout(2, "tp cp pp dp", tp=2, pp=2, dp=4)
LINE = layout(1, dp=8)


def votes(known: Layout, looks: list[dict[int, str]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for showing in looks:
        look = taken(showing, layout=known, ranks_per_machine=known.ranks_per_machine)
        found.update(flagged(look))
    return found


@pytest.mark.parametrize("known", [GRID, LINE])
def test_if_all_are_slower_nobody_is_named(known: Layout) -> None:
    """Ranks are found here and there in a step, each time others."""
    rng, named, jobs = random.Random(7), 0, 60
    for _ in range(jobs):
        places = ("all_reduce", "compute", "backward")
        looks = [
            {rank: rng.choices(places, (90, 5, 5))[0] for rank in range(known.world_size)}
            for _ in range(ROUNDS)
        ]
        counts = votes(known, looks)
        most = max(counts, key=counts.__getitem__, default="")
        named += counts[most] >= 3 and not by_chance(counts, most, known, ROUNDS)
    assert named <= jobs // 20


@pytest.mark.parametrize("known", [GRID, LINE])
def test_one_that_is_found_at_work_while_others_wait_is_no_chance(known: Layout) -> None:
    slow: dict[int, str] = {**dict.fromkeys(range(known.world_size), "all_reduce"), 5: "compute"}
    calm = dict.fromkeys(slow, "all_reduce")
    counts = votes(known, [slow, slow, calm, slow, slow])
    group = max(counts, key=counts.__getitem__)
    assert counts[group] == 4
    assert not by_chance(counts, group, known, ROUNDS)


def test_groups_of_a_kind_on_the_same_machines_are_counted_once() -> None:
    assert count(GRID, "pp 0-3") == 4
    assert count(GRID, "tp 0-1") == 8
    assert count(LINE, "machine with 3") == 8
