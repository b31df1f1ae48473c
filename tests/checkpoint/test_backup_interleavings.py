"""Every interleaving of training, backups, kills and lost machines, on the real decisions."""

from __future__ import annotations

import pytest

from everstep.checkpoint import slots
from everstep.checkpoint.kept import choose_kept
from everstep.checkpoint.need import SLOTS, SLOTS_WITH_BACKUPS
from everstep.checkpoint.pins import Pins
from everstep.checkpoint.slots import choose_slot
from everstep.model import NO_STEP, Step
from tests.checkpoint.backup_model import Model, explore
from tests.checkpoint.test_interleavings import held


@pytest.mark.parametrize(
    "model",
    [
        Model(machines=3, slots=SLOTS_WITH_BACKUPS),
        Model(machines=2, slots=SLOTS_WITH_BACKUPS, mishaps=1),
    ],
    ids=str,
)
def test_a_kill_costs_one_step_and_a_lost_machine_no_safe_one(model: Model) -> None:
    found = explore(model)
    assert found.story is None, "\n".join(found.story or [])
    assert found.states > 10_000


def test_one_pinned_slot_would_not_do_the_backup_is_overwritten_before_it_is_sent() -> None:
    story = explore(Model(machines=2, slots=SLOTS)).story
    assert story is not None
    assert "overwrote" in story[-1]


def test_two_pins_in_four_slots_would_not_do_a_kill_leaves_too_old_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if both pins were heeded at the cost of the slots that rotate."""
    monkeypatch.setattr(slots, "ROTATING", 2)
    story = explore(Model(machines=2, slots=SLOTS)).story
    assert story is not None
    assert "a kill leaves" in story[-1]


def test_the_former_safe_step_must_stay_pinned_until_the_next_is_complete_everywhere() -> None:
    story = explore(Model(machines=2, pins_safe=False)).story
    assert story is not None
    assert "was safe" in story[-1]


def test_a_peer_must_not_overwrite_the_safe_step() -> None:
    story = explore(Model(machines=2, keeps_safe=False, mishaps=1)).story
    assert story is not None
    assert "was safe" in story[-1]


@pytest.mark.parametrize(
    ("pins", "chosen"),
    [
        (Pins(), 0),
        (Pins(safe=Step(5)), 1),
        (Pins(safe=Step(5), backup=Step(6)), 2),
        (Pins(safe=Step(5), persist=Step(6)), 2),
        (Pins(safe=Step(5), persist=Step(5), backup=Step(6)), 2),
        (Pins(safe=Step(5), persist=Step(6), backup=Step(7)), 2),
        (Pins(safe=Step(5), persist=Step(40), backup=Step(6)), 1),
        (Pins(safe=Step(4), persist=Step(5), backup=Step(6)), 2),
    ],
    ids=str,
)
def test_of_three_pins_the_two_most_precious_are_heeded(pins: Pins, chosen: int) -> None:
    """Safe before disk before backup; a pin of a copy that is gone keeps nothing."""
    assert choose_slot(held(5, 6, 7, 8, 9), Step(10), pins) == chosen


@pytest.mark.parametrize(
    ("steps", "step", "safe", "busy", "chosen"),
    [
        ((None, None), 10, NO_STEP, (), 0),
        ((10, None), 20, NO_STEP, (), 1),
        ((10, 20), 30, 20, (), 0),
        ((10, 20), 30, 10, (), 1),
        ((10, 20), 30, NO_STEP, (), 0),
        ((30, 20), 25, NO_STEP, (), 0),
        ((None, 30), 30, 10, (), 1),
        ((10, 30), 30, 30, (), 0),
        ((30, 30), 40, 30, (), 1),
        ((10, 20), 30, 10, (1,), None),
        ((10, 20), 30, 20, (0, 1), None),
    ],
)
def test_the_kept_slot_that_goes_is_torn_or_abandoned_or_old_and_never_the_safe_one(
    steps: tuple[int | None, ...], step: int, safe: int, busy: tuple[int, ...], chosen: int | None
) -> None:
    assert choose_kept(held(*steps), Step(step), Step(safe), busy) == chosen
