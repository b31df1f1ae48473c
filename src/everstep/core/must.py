"""How a broken invariant is told: used by invariants.py, state_check.py and the simulator."""

from __future__ import annotations

from everstep.model import EverstepError


class InvariantBroken(EverstepError):
    """A defect of everstep; the journal's last record shows it."""


def must(condition: object, message: str) -> None:
    """An assert that stays on and is told apart from Python's own."""
    if not condition:
        raise InvariantBroken(f"This is a defect of everstep: {message}.")
