"""Whether ranks that send slices of what they hold alike do hold the same. Pure.

Called by core/observe.py when all machines have answered a backup: what only looks replicated would
be joined to a state that no rank ever had.
"""

from __future__ import annotations

from collections.abc import Iterable

from everstep.model import Rank, Replicated, Span


def differing(reports: Iterable[Replicated]) -> str:
    """Why some replicas are none, in a clause; empty if all are."""
    first: dict[tuple[Span, ...], Replicated] = {}
    told: dict[tuple[Span, ...], dict[Rank, None]] = {}
    for report in reports:
        known = first.setdefault(report.replicas, report)
        told.setdefault(report.replicas, {})[report.rank] = None
        if known.digest != report.digest:
            return (
                f"ranks {known.rank} and {report.rank} do not hold the same, although replicated"
                " parameters should be"
            )
    for replicas, ranks in told.items():
        count = sum(span.count for span in replicas)
        if len(ranks) != count:
            return (
                f"only {len(ranks)} of {count} ranks, rank {min(ranks)} among them, hold what all"
                " of them should hold alike"
            )
    return ""
