"""What everything in a simulated world stands on: time, chance, the disk, and the truth."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from everstep.actions import StartRanks
from everstep.model import Generation, JobSpec, MachineId, Published
from everstep.sim.blame import Blame
from everstep.sim.code import Codes
from everstep.sim.disk import Disk
from everstep.sim.options import Options, Script
from everstep.sim.records import Ledger
from everstep.sim.schedule import Schedule
from everstep.sim.training import Gang, Start
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
        self.codes = Codes(options.spec.code.version, options.seed)
        self.truth = Truth(self.disk, attached=options.script is not Script.UNATTACHED)
        self.blame = Blame(self)
        self.calm = False
        """Whether faults are over."""
        self.controller: Peer | None = None
        """Where agents find one; its successor once it is dead."""
        self.machines: dict[MachineId, Machine] = {}
        """All that ever were: where agents find each other."""
        self.gangs: dict[Generation, Gang] = {}
        self._pids = 0

    def job_of(self, order: StartRanks) -> JobSpec:
        """The job as it is in this order's generation."""
        spec = self.options.spec
        return spec.resized(order.nnodes, order.dp) if order.nnodes else spec

    def gang(self, order: StartRanks) -> Gang:
        """The processes of this order's generation."""
        gang = self.gangs.get(order.generation)
        if gang is None:
            start = Start(
                job=self.job_of(order),
                version=order.version,
                flaws=self.codes.flaws(order.version),
                spoiled=self.spoiled(
                    Published(step=order.restore, generation=order.restore_generation)
                ),
            )
            gang = Gang(order, start, self.options, self.schedule)
            self.gangs[order.generation] = gang
            gang.on_begin, gang.on_step = self.truth.began, self.truth.stepped
        return gang

    def spoiled(self, copy: Published) -> bool:
        """Whether there is nan in it."""
        gang = self.gangs.get(copy.generation)
        return gang is not None and gang.nan_from is not None and copy.step >= gang.nan_from

    def next_pid(self) -> int:
        self._pids += 1
        return self._pids
