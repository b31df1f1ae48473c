"""When nothing advances for longer than it should: what looking.py looks into.

Pure functions of what observe.py noted here. A stall is no failure yet: it only costs a look.
"""

from __future__ import annotations

from everstep.core.state import State
from everstep.events import StepProgress
from everstep.model import Seconds
from everstep.sightings import ActivitySeen


def progress_seen(state: State, event: StepProgress, now: Seconds) -> None:
    """Learn how long steps and phases take. Before the step in `event` is noted."""
    del state, event, now


def activity_seen(state: State, event: ActivitySeen, now: Seconds) -> None:
    """For how long the job has been quiet."""
    del state, event, now


def ranks_start(state: State) -> None:
    """What was learned outlives a restart; what goes on does not."""
    del state
