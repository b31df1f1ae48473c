"""Fewer machines than wanted, and none coming: going on with fewer data-parallel replicas.

Asked by rules.py while positions are free. Only if the job says that it is elastic; otherwise it
waits and says so. When machines are there again, the job grows back.
"""

from __future__ import annotations

from collections.abc import Iterator

from everstep.actions import ControllerAction
from everstep.core.deciding import Deciding, Planned
from everstep.core.state import State
from everstep.events import MachinesRequested
from everstep.model import Seconds


def machines_requested(state: State, event: MachinesRequested, now: Seconds) -> None:
    """A refusal leaves `requested` as it is: the machines are still wanted, from anybody."""
    del now
    state.outstanding.pop(event.action, None)
    state.refused = event.reason


def restart_for(d: Deciding) -> Planned | None:
    """Ranks that run are stopped to change the number of machines; None: they are not."""
    del d
    return None


def resize(d: Deciding) -> list[ControllerAction]:
    """With all ranks stopped: go on with fewer machines, or with all of them again."""
    del d
    return []


def tell_of_shortage(d: Deciding) -> list[ControllerAction]:
    """The job waits for machines that do not come."""
    del d
    return []


def deadlines(state: State) -> Iterator[Seconds]:
    """When the job has waited long enough."""
    del state
    yield from ()
