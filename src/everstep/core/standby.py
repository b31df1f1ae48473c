"""How many standbys a job keeps, and which of them are ready to be woken."""

from __future__ import annotations

from everstep.core.state import State
from everstep.model import Seconds


def wanted_standbys(state: State, now: Seconds) -> int:
    """As many as the job asks for."""
    del now
    assert state.spec is not None
    return state.spec.standbys
