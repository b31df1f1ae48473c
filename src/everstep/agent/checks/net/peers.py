"""What equal devices of one machine have in common. Used by the judges of speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

PEERS_MIN = 3
"""Of two that differ nobody can say which is wrong."""


def usual(values: Mapping[str, float]) -> float | None:
    """The value that more than half of at least three have; None if there is none."""
    if len(values) < PEERS_MIN:
        return None
    value, times = Counter(values.values()).most_common(1)[0]
    return value if times > len(values) / 2 else None
