"""What a fresh agent makes of what it finds: ranks that run on, and ranks that ended meanwhile.

Called once by the shell, before anything else. The heartbeat slots name the processes; the former
agent's memory says what was ordered and what the controller knows already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from everstep.agent.memory import Memory
from everstep.agent.watch import Watched
from everstep.core.agent_io import RanksAdopted
from everstep.model import ExitStatus, Generation, Rank
from everstep.processes import Process, alive
from everstep.trainer.heartbeat import Heartbeat


class Adoption(NamedTuple):
    """The first fact for the core, and what to watch."""

    event: RanksAdopted
    watch: list[Watched]
    """Ranks that run, or whose end was not told yet."""


def adopt(
    beats: Sequence[Heartbeat], memory: Memory, exit_of: Callable[[Process], ExitStatus]
) -> Adoption:
    """`exit_of` looks up how a process ended that is gone."""
    newest = max((beat.generation for beat in beats), default=0)
    generation = Generation(max(memory.generation, newest))
    told = memory.told if memory.generation == generation else []
    found = [_watched(beat) for beat in beats]
    # Dead ranks of an older generation were ordered to end: nobody waits for news of them.
    kept = [w for w in found if w.generation == generation or alive(w.process)]
    watch = [w for w in kept if w.rank not in told or w.generation != generation]
    statuses = [w.status(None if w in watch else exit_of(w.process)) for w in kept]
    return Adoption(RanksAdopted(generation=generation, ranks=tuple(statuses)), watch)


def _watched(beat: Heartbeat) -> Watched:
    return Watched(
        rank=Rank(beat.rank),
        generation=Generation(beat.generation),
        process=Process(beat.pid, beat.start_ticks),
    )
