"""What a look at all stacks means: who holds the others up, or that it is nobody's machine.

Pure; looking.py asks it about a stall, slowness.py about slow training, and the command about dumps
of any job. ByteRobust, section 5.1: alike stacks are one cluster, the dominant ones are healthy, the
smallest parallel group that contains the rest goes.
"""

from __future__ import annotations

from collections.abc import Mapping

from everstep.core.groups import Layout
from everstep.diagnosis.standing import Peer
from everstep.looks import Cluster, Fingerprint, LookResult, Stack, Stood
from everstep.model import NodeRank, Rank, Value


class Taken(Value, frozen=True, kw_only=True):
    """What a look brought."""

    clusters: tuple[Cluster, ...]
    stacks: Mapping[Fingerprint, Stack]
    stood: tuple[Stood, ...] = ()
    peers: tuple[Peer, ...] = ()
    silent: tuple[NodeRank, ...] = ()
    """Machines that did not answer; of their ranks nothing else is known."""
    unreached: tuple[tuple[NodeRank, NodeRank], ...] = ()
    """(who tried, whom it could not reach)."""
    layout: Layout | None = None
    world_size: int
    ranks_per_machine: int = 1


class Conclusion(Value, frozen=True, kw_only=True):
    """What it means."""

    result: LookResult
    """MACHINES, CODE, NOTHING or WORKS."""
    why: str
    """One sentence, with counts."""
    ranks: tuple[Rank, ...] = ()
    """Who holds the others up, or the outliers."""
    definite: bool = False
    """It is certain that these ranks hold the others up."""
    machines: tuple[NodeRank, ...] = ()
    """Who goes for it, with all of a group if it goes as a whole; only with MACHINES."""
    outliers: tuple[NodeRank, ...] = ()
    """The machines of `ranks` alone: what is left if the group is too large."""
    group: str = ""
    """The parallel group: "pp 24-31"."""


def conclude(taken: Taken) -> Conclusion:
    """What one look means. Whether it stands still, a second one has to say."""
    del taken
    return Conclusion(result=LookResult.NOTHING, why="nobody is an outlier")


def agree(earlier: Conclusion, later: Conclusion) -> bool:
    """Whether two looks in a row say the same: the same result and the same ranks."""
    return earlier.result is later.result and set(later.ranks) <= set(earlier.ranks)


def flagged(taken: Taken) -> tuple[str, ...]:
    """Of slow training: the parallel groups with the largest share of outliers; ties are all named."""
    del taken
    return ()
