"""What flight records of all ranks say together: who waits for whom. For aggregate.py.

Agents tell alike standings once, so a job has few of them beside its ranks; here they become what
diagnosis/standing.py reads, each set of members once.
"""

from __future__ import annotations

from collections.abc import Sequence

from everstep.diagnosis.standing import Peer, Standing, Standstill, standstill
from everstep.looks import Ranges, Stood, ranks_in
from everstep.model import Rank


def standings_of(stood: Sequence[Stood]) -> list[Standing]:
    """One for each rank and group. Groups in which nobody waits stand for their ranks only."""
    pending = {(s.group, s.members) for s in stood if _waits(s)}
    members: dict[Ranges, tuple[Rank, ...]] = {}
    found: list[Standing] = []
    told: set[Rank] = set()
    for one in sorted(stood, key=lambda s: (s.group, s.members) not in pending):
        if one.members not in members:
            members[one.members] = tuple(ranks_in(one.members))
        calls = dict(one.calls)
        within = (one.group, one.members) in pending
        ranks = [rank for rank in ranks_in(one.ranks) if within or rank not in told]
        told.update(ranks)
        found += [
            Standing(
                rank=rank,
                group=one.group,
                members=members[one.members],
                enqueued=one.enqueued,
                completed=one.completed,
                calls=calls,
            )
            for rank in ranks
        ]
    return found


def _waits(stood: Stood) -> bool:
    last, done = stood.enqueued, stood.completed
    return last is not None and done is not None and last > done


def recorded(stood: Sequence[Stood], peers: Sequence[Peer], size: int) -> Standstill | None:
    """Who waits for whom; None if no record says anything."""
    standings = standings_of(stood)
    return standstill(standings, peers, size) if standings else None
