"""Who really holds a simulated job up, and whether the controller blames the right ones for it.

A part of truth.py for looks at stacks: it knows which ranks are held up, and which pauses are
healthy. For controller.py and run.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from everstep.actions import CollectStacks, ControllerAction, JudgeStacks
from everstep.core.must import must
from everstep.core.state import Phase, State
from everstep.looks import LookResult, Purpose
from everstep.model import Generation, MachineId, PolicySpec, Seconds
from everstep.sim.hanging import OF_MACHINES, Hold

if TYPE_CHECKING:
    from everstep.sim.ground import Ground
    from everstep.sim.training import Gang

STOPS = (LookResult.MACHINES, LookResult.CODE, LookResult.NOTHING)
"""With these a generation that stands still is given up."""
SLOW_WITHIN_S: Seconds = 180.0
"""Slow rounds tell of the last minutes."""
RESTARTS_S: Seconds = 30.0


class _Asked(NamedTuple):
    """When a look was begun, and what for."""

    at: Seconds
    purpose: Purpose
    generation: Generation


class Blame:
    """Judge of one run. Raises InvariantBroken."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._asked: dict[int, _Asked] = {}
        self._calm_since: Seconds | None = None
        self.judged: dict[LookResult, int] = {}
        """What looks came to, and how often."""

    def decided(self, actions: Sequence[ControllerAction], state: State, now: Seconds) -> None:
        """A record is in the journal."""
        for action in actions:
            if isinstance(action, CollectStacks):
                watching = state.watching
                purpose = Purpose.ASKED if watching is None else watching.purpose
                self._asked.setdefault(action.look, _Asked(now, purpose, action.generation))
            elif isinstance(action, JudgeStacks):
                self._judge(action)
        if self._ground.calm:
            self._lasts(state, now)

    def _judge(self, action: JudgeStacks) -> None:
        self.judged[action.result] = self.judged.get(action.result, 0) + 1
        asked = self._asked[action.look]
        former = self._asked.get(action.look - 1, asked)
        since = former.at if former.generation == asked.generation else asked.at
        gang = self._ground.gangs.get(asked.generation)
        name = f"{action.id} says {action.result} of look {action.look}"
        if asked.purpose is Purpose.SLOW:
            since -= SLOW_WITHIN_S
        elif asked.purpose is Purpose.HANG and action.result in STOPS:
            must(
                gang is None or self._stood(gang, since),
                f"{name}, and generation {asked.generation} did not stand still: {action.why}",
            )
        if action.result is LookResult.MACHINES:
            guilty = self._guilty(gang, since)
            if asked.purpose is Purpose.SLOW and gang is not None:
                guilty |= dict.fromkeys(gang.slower())
            # Either end of a line between two machines that is cut may be the broken one.
            cut = any(machine.cut(since) for machine in self._ground.machines.values())
            two = gang is not None and len({p.machine for p in gang.processes.values()}) == 2
            if not (cut and two):
                _check_named(action, guilty, name)

    def _guilty(self, gang: Gang | None, since: Seconds) -> dict[MachineId, None]:
        held = [] if gang is None else [p for p in gang.processes.values() if p.was_held(since)]
        ails = [m.name for m in self._ground.machines.values() if m.ails(since)]
        return dict.fromkeys([*(process.machine for process in held), *ails])

    def _stood(self, gang: Gang, since: Seconds) -> bool:
        """Whether it ever stood still since then, for whatever reason."""
        if not gang.began or gang.strayed or gang.broke_at is not None:
            return True
        machines = self._ground.machines
        return any(
            process.was_held(since, (*OF_MACHINES, Hold.LOCK))
            or machines[process.machine].cut(since)
            for process in gang.processes.values()
        )

    def _lasts(self, state: State, now: Seconds) -> None:
        """Once nothing else goes wrong, no rank is held up for long."""
        if self._calm_since is None:
            self._calm_since = now
        gang = self._ground.gangs.get(state.generation)
        if gang is None or state.phase is not Phase.RUNNING or state.broken:
            return
        stood_since = gang.stood_since(now)
        if stood_since is not None:
            stands_s = now - max(self._calm_since, stood_since)
            bound_s = longest_hang_s(state.job.policy) + gang.pauses_s
            must(
                stands_s <= bound_s,
                f"generation {gang.generation} has stood still for {stands_s:.0f} s, more than"
                f" {bound_s:.0f} s, and nobody stops it",
            )


def _check_named(action: JudgeStacks, guilty: dict[MachineId, None], name: str) -> None:
    """Guilty, or of one group with a guilty one: that is over-eviction."""
    named = [machine in guilty for machine in action.machines]
    must(
        any(named) if action.group else all(named),
        f"{name} and names {', '.join(action.machines)} ({action.group or 'by itself'}), while"
        f" {', '.join(guilty) or 'nobody'} held the job up: {action.why}",
    )


def longest_hang_s(policy: PolicySpec) -> Seconds:
    """Noticed late, looked into as often as can be, and then a decision."""
    one_s = policy.look_within_s + policy.look_again_s + policy.look_retry_s
    return policy.stall_max_s + (policy.looks_max + 2) * one_s + RESTARTS_S
