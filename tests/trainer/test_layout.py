"""What a script is told of its replicas, and that the global batch stays the same at any size."""

from __future__ import annotations

import pytest

import everstep
from everstep.trainer.layout import Layout, layout_of


def replicas(dp: int, full: int) -> list[Layout]:
    return [Layout(world_size=dp, dp=dp, dp_full=full, replica=at) for at in range(dp)]


@pytest.mark.parametrize(("dp", "full"), [(1, 1), (3, 3), (2, 3), (1, 3), (4, 8), (5, 8), (7, 8)])
def test_every_part_of_the_global_batch_is_computed_once(dp: int, full: int) -> None:
    layouts = replicas(dp, full)
    assert sorted(part for each in layouts for part in each.shares) == list(range(full))
    rounds = {each.accumulate for each in layouts}
    assert rounds == {len(each.micro_steps) for each in layouts}
    assert len(rounds) == 1, "micro-steps may communicate: all do as many"
    assert sum(rounds) == -(-full // dp)


@pytest.mark.parametrize(("dp", "full"), [(3, 3), (2, 3), (5, 8)])
def test_weighted_gradients_are_those_of_the_whole_batch(dp: int, full: int) -> None:
    gradients = [float(part * part) for part in range(full)]
    each = [
        sum(weight * gradients[part] for part, weight in layout.micro_steps)
        for layout in replicas(dp, full)
    ]
    assert sum(each) / dp == pytest.approx(sum(gradients) / full)


def test_outside_everstep_every_rank_is_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    assert layout_of(None) == Layout(world_size=1, dp=1, dp_full=1, replica=0)
    assert everstep.attach().layout.accumulate == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert layout_of(None).micro_steps == ((3, 1.0),)
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert layout_of(None).dp == 1
