"""What a rule is given: the state to read, the time, and ids for the actions it makes."""

from __future__ import annotations

from everstep.actions import Rung
from everstep.core.accusers import Group
from everstep.core.state import State
from everstep.model import Seconds, Value


class Planned(Value, frozen=True, kw_only=True):
    """Ranks that are well are to be stopped."""

    rung: Rung
    """What for."""
    why: str


class Deciding:
    """One question to all rules. Reads only: a rule returns actions and changes nothing."""

    def __init__(self, state: State, now: Seconds, already: int) -> None:
        """`already` actions were decided for the current event before."""
        self.state = state
        self.now = now
        self.groups: list[Group] | None = None
        """What evicting.py found about accused machines: several rules ask the same."""
        self._count = already

    @property
    def event(self) -> str:
        """Id of the event being handled: the cause of what is decided because of it."""
        return str(self.state.seq)

    def id(self) -> str:
        """The next action's id: the event's number and a running number."""
        made = f"{self.state.seq}.{self._count}"
        self._count += 1
        return made
