"""What checks say of machines: kept while it holds, and counted.

Asked by rules.py for machines to evict, by evidence.py for what weighs when something else failed.
"""

from __future__ import annotations

from everstep.core.state import State
from everstep.events import AlertCleared, AlertRaised
from everstep.model import Seconds


def alert_raised(state: State, event: AlertRaised, now: Seconds) -> None:
    """One more alert, or the same one again."""
    del state, event, now


def alert_cleared(state: State, event: AlertCleared, now: Seconds) -> None:
    """It holds no more; that it was there still counts for a while."""
    del state, event, now
