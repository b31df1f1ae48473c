"""What everything in a simulated world stands on: time, chance, the disk, and the truth."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from everstep.model import Generation, MachineId, Step
from everstep.sim.disk import Disk
from everstep.sim.options import Options
from everstep.sim.records import Ledger
from everstep.sim.schedule import Schedule
from everstep.sim.training import Gang
from everstep.sim.truth import Truth

if TYPE_CHECKING:
    from everstep.sim.machine import Machine
    from everstep.sim.network import Peer

BEGINS_AT = 1000.0
"""Time at the start of a run: not 0, which forgives too much."""


class Ground:
    """Of one run."""

    def __init__(self, options: Options, tell: Callable[[str], None]) -> None:
        """`tell` hears of everything that happens, as lines for people."""
        self.options = options
        self.tell = tell
        self.schedule = Schedule(BEGINS_AT)
        self.rng = Random(options.seed)  # noqa: S311 -- a seed that is printed, not a secret
        self.disk = Disk(options.spec.world_size, options.spec.checkpoint.keep)
        self.ledger = Ledger()
        self.truth = Truth(self.disk)
        self.calm = False
        """Whether faults are over."""
        self.controller: Peer | None = None
        """Where agents find one; its successor once it is dead."""
        self.machines: dict[MachineId, Machine] = {}
        """All that ever were: where agents find each other."""
        self.gangs: dict[Generation, Gang] = {}
        self._pids = 0

    def gang(self, generation: Generation, restore: Step) -> Gang:
        """The processes of this generation."""
        gang = self.gangs.get(generation)
        if gang is None:
            gang = self.gangs[generation] = Gang(generation, restore, self.options, self.schedule)
            gang.on_begin, gang.on_step = self.truth.began, self.truth.stepped
        return gang

    def next_pid(self) -> int:
        self._pids += 1
        return self._pids
