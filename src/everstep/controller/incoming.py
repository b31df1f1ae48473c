"""What the loop takes in: an event, where it came from, and what to do once it is journalled.

Made by agents.py, server.py, act.py and start.py; taken by loop.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from everstep.events import ControllerEvent
from everstep.journal import Origin


class Incoming(NamedTuple):
    """One event on its way to the core."""

    event: ControllerEvent
    then: Callable[[], None] | None = None
    """Called when the event is in the journal and before what it led to is carried out."""
    origin: Origin | None = None
    """The message that it came in, if an agent sent it."""
