"""What a simulated agent reads of its ranks at a look, as agent/progress.py does. For agent.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from everstep.core.agent_io import ActivityRead, GroupsRead, NumbersRead, SlotsRead
from everstep.model import NO_GENERATION, NO_STEP, Generation, Seconds, Step
from everstep.sightings import BadNumber, Computes, Numbers
from everstep.sim.options import Harm, Script
from everstep.sim.training import Gang, Process

if TYPE_CHECKING:
    from everstep.sim.machine import Machine

Read = ActivityRead | SlotsRead | GroupsRead | NumbersRead


class Reading:
    """Of one agent."""

    def __init__(self, machine: Machine, tell: Callable[[Read], None]) -> None:
        self._machine = machine
        self._ground = machine.ground
        self._tell = tell
        self._groups_of = NO_GENERATION
        self._numbers_of: tuple[Generation, Step] = (NO_GENERATION, NO_STEP)

    def look(self, generation: Generation) -> None:
        """What the ranks of this generation have come to."""
        now = self._ground.schedule.now
        processes = [p for p in self._machine.processes.values() if p.generation == generation]
        beats = [process.finished(now)[0] for process in processes]
        if not beats or not self._machine.running():
            return
        gang = self._ground.gangs[generation]
        quiet_s = gang.quiet_s(now)
        self._tell(
            ActivityRead(
                generation=generation, quiet_s=quiet_s, no_traffic_s=quiet_s, idle_s=quiet_s
            )
        )
        phase, phase_s = gang.phase_at(now)
        if self._groups_of != generation and min(beats) > NO_STEP:
            self._groups_of = generation
            seen = self._ground.options.groups_of(generation)
            self._tell(GroupsRead(generation=generation, seen=seen))
        self._tell(
            SlotsRead(
                generation=generation,
                slowest=min(beats),
                fastest=max(beats),
                step_s=processes[0].step_s,
                phase=phase,
                phase_s=phase_s,
                computes=self._computes(processes),
            )
        )
        self._look_at_speed(processes[0], now)
        self._look_for_nan(gang, processes, now)

    def _may_slow_down(self) -> bool:
        options = self._ground.options
        return Harm.SLOW_DOWN in options.harms and options.script is not Script.UNATTACHED

    def _computes(self, processes: list[Process]) -> tuple[Computes, ...]:
        """How long ranks compute in a step, if that ever changes."""
        if not self._may_slow_down():
            return ()
        step_s = self._ground.options.step_s
        return tuple(
            Computes(rank=process.rank, seconds=step_s * process.slowness)
            for process in processes
            if process.step_s is not None
        )

    def _look_at_speed(self, first: Process, now: Seconds) -> None:
        newest = first.finished(now)[0]
        if self._may_slow_down() and first.step_s and (first.generation, newest) > self._numbers_of:
            self._numbers_of = (first.generation, newest)
            numbers = (Numbers(step=newest, loss=1.0, speed=1.0 / first.step_s),)
            generation = first.generation
            self._tell(NumbersRead(generation=generation, rank=first.rank, numbers=numbers))

    def _look_for_nan(self, gang: Gang, processes: list[Process], now: Seconds) -> None:
        """What is not finite."""
        for process in processes:
            if gang.nan_from is not None and process.finished(now)[0] >= gang.nan_from:
                bad = BadNumber(rank=process.rank, step=gang.nan_from)
                self._tell(NumbersRead(generation=gang.generation, bad=bad))
                return
