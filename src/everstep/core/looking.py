"""Looks at the stacks of all ranks: when to take one, whom to ask, what follows from it.

rules.py has `look` in its place; observe.py and commit.py have facts and decisions noted here.
aggregate.py says what a look shows, stalls.py when nothing advances, slowness.py when training
became slower, over_eviction.py who goes for it.
"""

from __future__ import annotations

from collections.abc import Iterator

from everstep.actions import CollectStacks, ControllerAction, JudgeStacks, SendStacks
from everstep.core.deciding import Deciding
from everstep.core.state import State
from everstep.model import Seconds
from everstep.sightings import StacksRequested, StacksSent, StacksTaken

# --- taking note ---------------------------------------------------------------------------------


def stacks_requested(state: State, event: StacksRequested, now: Seconds) -> None:
    """A person wants to see them."""
    del now
    state.stacks_wanted_by = event.by


def stacks_taken(state: State, event: StacksTaken, now: Seconds) -> None:
    """What machines answered."""
    del now
    for action in event.actions:
        state.outstanding.pop(action, None)


def stacks_sent(state: State, event: StacksSent, now: Seconds) -> None:
    """Texts came."""
    del now
    state.outstanding.pop(event.action, None)


def collect_stacks(state: State, action: CollectStacks, now: Seconds) -> None:
    """A machine was asked."""
    del now
    state.outstanding[action.id] = action


def send_stacks(state: State, action: SendStacks, now: Seconds) -> None:
    """A machine was asked for texts."""
    del now
    state.outstanding[action.id] = action


def judge_stacks(state: State, action: JudgeStacks, now: Seconds) -> None:
    """A look is judged."""
    del state, action, now


# --- deciding ------------------------------------------------------------------------------------


def look(d: Deciding) -> list[ControllerAction]:
    """The next thing to do with stacks."""
    del d
    return []


def symptom(d: Deciding) -> str:
    """Why an incident begins although nothing failed: training stands still, or became slower."""
    del d
    return ""


def deadlines(state: State) -> Iterator[Seconds]:
    """When there may be something to look at, or to give up."""
    del state
    yield from ()
