"""When training became slower, or one rank holds up all others: what looking.py looks into.

slowdown.py tells falling speed for the checks; here it is what is done about it when no check knows
why.
"""

from __future__ import annotations

from everstep.core.state import State
from everstep.model import Seconds
from everstep.sightings import StragglerSeen


def straggler_seen(state: State, event: StragglerSeen, now: Seconds) -> None:
    """A rank holds up all others, or does no more."""
    del state, event, now
