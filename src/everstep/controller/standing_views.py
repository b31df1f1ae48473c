"""How far the ranks of each group are in their collectives, as sentences for people.

Pure; look_views.py has them beside the clusters of a look. Who is late is shown and not accused:
diagnosis/standing.py says what it means.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from everstep.diagnosis.standing import Call
from everstep.looks import Ranges, Stood, in_words, joined, ranges_of, ranks_in, size_of

GROUPS = 8
"""Groups that get a sentence: of more, the first that have somebody late."""


def standing_lines(stood: Iterable[Stood], most: int = GROUPS) -> tuple[str, ...]:
    """Of each group in which somebody waits one sentence, those with late ranks first."""
    groups: dict[tuple[str, Ranges], list[Stood]] = {}
    for each in stood:
        groups.setdefault((each.group, each.members), []).append(each)
    told = sorted(
        (line for (name, _), parts in groups.items() if (line := _of_group(name, parts))),
        key=lambda line: line[0],
    )
    more = len(told) - most
    rest = (f"and {more} more group{'s' * (more > 1)} in which ranks wait",) if more > 0 else ()
    return (*(text for _, text in told[:most]), *rest)


def _of_group(name: str, parts: Sequence[Stood]) -> tuple[tuple[int, str], str] | None:
    """Its place in the order, and the sentence; None if nobody waits."""
    waits = [part for part in parts if _waits_at(part) is not None]
    seq = min((at for part in waits if (at := _waits_at(part)) is not None), default=None)
    if seq is None:
        return None
    called = [part for part in parts if (part.enqueued or 0) >= seq]
    late = [part for part in parts if part.enqueued is not None and part.enqueued < seq]
    calls = {number: call for part in called for number, call in part.calls}
    what = f" ({calls[seq]})" if seq in calls else ""
    text = f"collective {seq} of group {name}{what}: "
    there = _together(part.ranks for part in waits)
    if late:
        absent = _together(part.ranks for part in late)
        text += f"{_ranks(there)} in it, {_ranks(absent, 'has', 'have')} not called it"
    else:
        text += f"{_ranks(there)} in it, nobody on record is late"
    told = {rank for part in parts for rank in ranks_in(part.ranks)}
    unknown = [rank for rank in ranks_in(parts[0].members) if rank not in told]
    if unknown:
        text += f"; {_named(ranges_of(unknown))} left no record"
    kinds = sorted({call.op for part in called for number, call in part.calls if number == seq})
    if len(kinds) > 1:
        text += f"; ranks called it differently: {_differently(called, seq, kinds)}"
    return (0 if late or len(kinds) > 1 else 1, name), text


def _waits_at(part: Stood) -> int | None:
    if part.enqueued is None or part.completed is None or part.enqueued <= part.completed:
        return None
    return part.completed + 1


def _differently(parts: Sequence[Stood], seq: int, kinds: Sequence[str]) -> str:
    def of(op: str) -> Ranges:
        return _together(part.ranks for part in parts if _op(part.calls, seq) == op)

    return ", ".join(f"{op} by {_named(of(op))}" for op in kinds)


def _op(calls: Iterable[tuple[int, Call]], seq: int) -> str:
    return next((call.op for number, call in calls if number == seq), "")


def _together(ranges: Iterable[Ranges]) -> Ranges:
    return joined(pair for each in ranges for pair in each)


def _named(ranks: Ranges) -> str:
    return f"rank{'s' * (size_of(ranks) > 1)} {in_words(ranks)}"


def _ranks(ranks: Ranges, one: str = "waits", many: str = "wait") -> str:
    """As "rank 5 waits", "ranks 0-3 wait"."""
    return f"{_named(ranks)} {one if size_of(ranks) == 1 else many}"
