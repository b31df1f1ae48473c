"""Which machines are cut off from the others, by who could not reach whom. For aggregate.py.

With a look every machine tries to reach the next two. That is the way that collectives go, which
may be cut while the agents' connections to the controller are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from everstep.model import NodeRank

TRIED = 2
"""Machines that each one tries to reach."""


def cut_off(unreached: Sequence[tuple[NodeRank, NodeRank]], machines: int) -> list[NodeRank]:
    """Those that nobody who tried reaches, and those that reach nobody while others do.

    Of two machines either may be the one: both are named.
    """
    pairs = {(a, b) for a, b in unreached if a != b}
    tried = min(TRIED, machines - 1)
    to, by = Counter(b for _, b in pairs), Counter(a for a, _ in pairs)
    alone = {a for a, count in by.items() if count >= tried}
    unreachable = {b for b, count in to.items() if count >= tried}
    return sorted(unreachable | alone)
