"""Which of many phases counts: of the ranks of a machine (agent/paces.py), of all (intake.py)."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.model import RankPhase, Seconds

LONG = frozenset({RankPhase.RESTORING, RankPhase.EVALUATING, RankPhase.SAVING, RankPhase.COMPILING})
"""They may take much longer than a step."""
_WEIGHT = {
    RankPhase.ENDED: 0,
    RankPhase.TRAINING: 1,
    RankPhase.STARTING: 2,
    **dict.fromkeys(LONG, 3),
}


def foremost(phases: Iterable[tuple[RankPhase, Seconds]]) -> tuple[RankPhase, Seconds]:
    """A long one wins, else one that still starts; of several the one that lasts longest.

    That all have ended is said if all have.
    """
    nothing = (RankPhase.TRAINING, 0.0)
    return max(phases, key=lambda each: (_WEIGHT[each[0]], each[1]), default=nothing)
