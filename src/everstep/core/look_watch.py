"""What must hold of looks at stacks, judged by decisions alone. Used by invariants.py.

hang_watch.py judges by events, too, whether what a look led to was right.
Like Watch it knows nothing of the core's state. It says what is wrong, as clauses: none if all is
well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from everstep.actions import (
    BeginGeneration,
    CollectStacks,
    ControllerAction,
    JudgeStacks,
    SendStacks,
)
from everstep.looks import LookResult, Purpose
from everstep.model import NO_GENERATION, Generation, MachineId

LOOKS_MIN = 2
"""One look shows a moment; what is the same in two stands still."""
FINAL = frozenset({LookResult.MACHINES, LookResult.CODE, LookResult.NOTHING})
"""Said of a hang, they end the generation."""


class LookWatch:
    """Sees every decision, one after the other, from the first record on."""

    def __init__(self) -> None:
        self._generation: Generation = NO_GENERATION
        self._look = 0
        """Number of the newest."""
        self._purpose = Purpose.ASKED
        self._asked: dict[MachineId, None] = {}
        """In it."""
        self._hangs = 0
        """Looks at ranks that stand still, in this generation."""
        self._judged: dict[int, LookResult] = {}

    def see(self, action: ControllerAction, positions: Collection[MachineId]) -> Iterator[str]:
        """What is wrong with this decision. `positions`: machines that have one."""
        if isinstance(action, BeginGeneration):
            self._generation, self._hangs = action.generation, 0
        elif isinstance(action, CollectStacks):
            yield from self._collect(action, positions)
        elif isinstance(action, SendStacks):
            if action.look != self._look or action.machine not in self._asked:
                yield f"SendStacks {action.id} is of look {action.look}, the newest is {self._look}"
        elif isinstance(action, JudgeStacks):
            yield from self._judge(action, positions)

    def _collect(self, action: CollectStacks, positions: Collection[MachineId]) -> Iterator[str]:
        name = f"CollectStacks {action.id}"
        if action.look == self._look + 1:
            self._look, self._purpose = action.look, action.purpose
            self._asked.clear()
            self._hangs += action.purpose is Purpose.HANG
        if action.look != self._look:
            yield f"{name} is of look {action.look}, the newest is {self._look}"
        if action.machine in self._asked:
            yield f"{name} asks {action.machine} twice"
        if action.machine not in positions:
            yield f"{name} goes to {action.machine}, which has no position"
        if action.generation != self._generation:
            yield f"{name} is not of generation {self._generation}"
        self._asked[action.machine] = None

    def _judge(self, action: JudgeStacks, positions: Collection[MachineId]) -> Iterator[str]:
        name = f"JudgeStacks {action.id} ({action.result})"
        if not 0 < action.look <= self._look:
            yield f"{name} is of look {action.look}, the newest is {self._look}"
        again = self._judged.get(action.look)
        if again is not None and action.result is not LookResult.WENT_ON:
            yield f"{name}: look {action.look} was judged before"
        self._judged[action.look] = action.result
        if action.result not in FINAL:
            return
        if self._purpose is Purpose.ASKED:
            yield f"{name} is more than a person asked for"
        certain = action.result is not LookResult.NOTHING
        if certain and self._purpose is Purpose.HANG and self._hangs < LOOKS_MIN:
            yield f"{name} follows from one look at ranks that stand still"
        if action.result is not LookResult.MACHINES:
            return
        if not action.machines:
            yield f"{name} names nobody"
        for machine in action.machines:
            if machine not in positions:
                yield f"{name} names {machine}, which has no position"
