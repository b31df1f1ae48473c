"""Every interleaving of ranks, copies, commits, pins, kills and restarts, on the real rotation."""

from __future__ import annotations

import pytest

from everstep.checkpoint import slots
from everstep.checkpoint.need import SLOTS
from everstep.checkpoint.pins import Pins
from everstep.checkpoint.slots import Held, choose_slot
from everstep.model import Generation, Step
from tests.checkpoint.protocol_model import Model, explore

ANY = (-1, 0, 1)
"""A step before, at and after the rank's newest."""


@pytest.mark.parametrize(
    "model",
    [
        Model(ranks=2, slots=SLOTS, pins=ANY),
        Model(ranks=2, slots=SLOTS, pins=(1,), pinned_at_once=1, restarts=True),
        Model(ranks=3, slots=SLOTS - 1),
        Model(ranks=3, slots=SLOTS, restarts=True),
        Model(ranks=3, slots=SLOTS, pins=(1,), pinned_at_once=2),
    ],
    ids=str,
)
def test_a_kill_at_any_moment_leaves_the_newest_finished_step_or_the_one_before(
    model: Model,
) -> None:
    found = explore(model)
    assert found.story is None, "\n".join(found.story or [])
    assert found.states > 100


@pytest.mark.parametrize(
    "model",
    [
        Model(ranks=3, slots=SLOTS - 1, microbatches=2),
        Model(ranks=2, slots=SLOTS, microbatches=2, restarts=True),
    ],
    ids=str,
)
def test_the_stages_of_a_pipeline_keep_the_promise_too_whatever_their_schedule(
    model: Model,
) -> None:
    """Nor do they ever update in an order that lockstep forbids (the model asserts it): whatever
    is shown for ranks in lockstep, here and with backups, holds for pipelines."""
    found = explore(model)
    assert found.story is None, "\n".join(found.story or [])
    assert found.states > 1000


def test_two_slots_would_lose_every_common_step_of_a_pipeline() -> None:
    assert explore(Model(ranks=2, slots=2, microbatches=1)).story is not None


@pytest.mark.parametrize("ranks", [2, 3])
def test_two_slots_would_lose_every_common_step(ranks: int) -> None:
    story = explore(Model(ranks=ranks, slots=2)).story
    assert story is not None
    assert any("begins" in line for line in story)


def test_three_slots_would_not_do_while_one_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the pin were heeded at the cost of the slots that rotate."""
    monkeypatch.setattr(slots, "ROTATING", 2)
    assert explore(Model(ranks=2, slots=3, pins=(0,))).story is not None


def held(*steps: int | None) -> list[Held | None]:
    return [
        None if step is None else Held(step=Step(step), generation=Generation(1)) for step in steps
    ]


@pytest.mark.parametrize(
    ("copies", "step", "pinned", "chosen"),
    [
        (held(None, None, None, None), 0, None, 0),
        (held(7, None, 8, 9), 10, None, 1),
        (held(6, 7, 8, 9), 10, None, 0),
        (held(6, 7, 8, 9), 10, 6, 1),
        (held(6, 7, 8, 9), 10, 9, 0),
        (held(5, 6, 20, 19), 7, None, 3),
        (held(5, 6, 20, 7), 7, 7, 2),
        (held(5, None, 6, 7), 8, 8, 1),
    ],
)
def test_what_is_worth_nothing_goes_first_and_the_pinned_step_never(
    copies: list[Held | None], step: int, pinned: int | None, chosen: int
) -> None:
    pins = Pins(persist=None if pinned is None else Step(pinned))
    assert choose_slot(copies, Step(step), pins) == chosen
