"""Where each rank stands in each of its groups, and who therefore waits for whom.

flight.py and silence.py turn records and log lines into `Standing`s; the analysis is one. A rank
with a collective pending waits. It waits for the members of the group that have not called that
collective yet, and of those only the ones that wait for nobody hold the job up. Being few, being
behind in a count or being listed by a tool makes nobody guilty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from everstep.model import Rank, Value

FEW = 0.25
"""More ranks than this share of a group are no outliers in it."""


class State(StrEnum):
    """How far a device got with a collective, as torch records it."""

    SCHEDULED = "scheduled"
    STARTED = "started"
    COMPLETED = "completed"


class Call(Value, frozen=True, kw_only=True):
    """One collective, as one rank called it."""

    op: str
    """Without its back end: all_reduce."""
    numel_in: int | None = None
    numel_out: int | None = None
    dtype: str = ""
    state: State = State.SCHEDULED
    at: str = ""
    """The innermost function of the user's code."""

    def __str__(self) -> str:
        sizes = "" if self.numel_in is None else f" of {self.numel_in} elements"
        kind = f" {self.dtype}" if self.dtype else ""
        return f"{self.op}{sizes}{kind}" + (f", at {self.at}" if self.at else "")


class Standing(Value, frozen=True, kw_only=True):
    """One rank in one group."""

    rank: Rank
    group: str
    members: tuple[Rank, ...] = ()
    """Global ranks of the group; empty if no source says so."""
    enqueued: int | None = None
    """Sequence number of the last collective that it called; None if that is not known."""
    completed: int | None = None
    """Of the last one that it finished."""
    calls: Mapping[int, Call] = {}
    """By sequence number, as far as they are on record."""

    @property
    def waits_at(self) -> int | None:
        """The collective that it waits in, None if it waits in none of this group."""
        if self.enqueued is None or self.completed is None or self.enqueued <= self.completed:
            return None
        return self.completed + 1


class Peer(Value, frozen=True, kw_only=True):
    """A send or receive that is pending."""

    rank: Rank
    peer: Rank
    sends: bool


class Shape(StrEnum):
    """What kind of standstill it is."""

    LATE = "late"
    """Few ranks have not called what the others wait in, and wait for nobody."""
    AHEAD = "ahead"
    """Few ranks wait in a collective that most have not called."""
    DIFFERENT = "different"
    """Ranks called different things as the same collective."""
    CIRCLE = "circle"
    """Ranks wait for each other in different groups."""
    UNFINISHED = "unfinished"
    """Few ranks have not finished or begun what all have called."""
    JOINED = "joined"
    """All have called it and none has finished."""
    PAIR = "pair"
    """A send and the receive that fits it are both pending, and all others wait for these."""
    ABSENT = "absent"
    """All on record wait, and some ranks have no record."""
    NOTHING = "nothing"
    """No collective is pending."""


class Standstill(Value, frozen=True, kw_only=True):
    """The answer."""

    shape: Shape
    group: str = ""
    seq: int | None = None
    ranks: tuple[Rank, ...] = ()
    """Whom the shape is about: the late, those ahead, the unfinished, the absent."""
    waiting: tuple[Rank, ...] = ()
    size: int = 0
    """Ranks of the group, as far as known."""
    call: Call | None = None
    """What they wait in."""
    other: tuple[Rank, Call] | None = None
    """A rank that called something else, and what."""
    reference: tuple[Rank, Call] | None = None
    behind: int = 0
    """How many collectives the late are behind the most advanced."""


# Each of these has one size on all ranks; of others (all_to_all, gather, lists) sizes may differ.
_EVEN = frozenset(
    (
        "all_reduce",
        "allreduce",
        "broadcast",
        "reduce",
        "_all_gather_base",
        "_allgather_base",
        "all_gather_into_tensor",
        "all_gather_single",
        "_reduce_scatter_base",
        "reduce_scatter_tensor",
        "reduce_scatter_single",
    )
)


def standstill(
    standings: Sequence[Standing], peers: Sequence[Peer] = (), size: int = 0
) -> Standstill:
    """Who waits for whom. `size` is the world size if known, 0 if not."""
    groups = _groups(standings)
    ranks = {standing.rank for standing in standings}
    blocked = {s.rank for s in standings if s.waits_at is not None} | {p.rank for p in peers}
    if not blocked:
        return Standstill(shape=Shape.NOTHING, size=len(ranks))
    for group in groups:
        if (found := _different(group)) is not None:
            return found
    late = {rank for group in groups for rank in _late(group)} | _silent(peers, ranks)
    main = max(groups, key=lambda group: sum(s.waits_at is not None for s in group))
    if late - blocked:
        return _held(groups, late - blocked, blocked, ranks)
    if late and (end := _end(groups, peers, late, blocked)) is not None:
        return end
    return _all_wait(groups, main, late, blocked, size)


def _groups(standings: Sequence[Standing]) -> list[list[Standing]]:
    """By name and members: two groups of one name with other members are two groups."""
    members: dict[str, set[int]] = {}
    number = _numbers(standings)
    for standing in standings:
        if standing.members:
            members.setdefault(standing.group, set()).add(number[id(standing.members)])
    groups: dict[tuple[str, int], list[Standing]] = {}
    for standing in standings:
        known = members.get(standing.group, set())
        only = next(iter(known)) if len(known) == 1 else -1
        which = number[id(standing.members)] if standing.members else only
        groups.setdefault((standing.group, which), []).append(standing)
    return list(groups.values())


def _numbers(standings: Sequence[Standing]) -> dict[int, int]:
    """Each set of members once, by identity: standings share them, and to hash one for each of a
    hundred thousand ranks would take minutes.
    """
    sets = {id(standing.members): standing.members for standing in standings}
    numbers: dict[tuple[Rank, ...], int] = {}
    return {key: numbers.setdefault(members, len(numbers)) for key, members in sets.items()}


def _silent(peers: Sequence[Peer], ranks: set[Rank]) -> set[Rank]:
    """Ranks that a send or receive waits for and that have none pending with the other."""
    pairs = {(peer.rank, peer.peer) for peer in peers}
    return {b for a, b in pairs if (b, a) not in pairs and b in ranks}


def _end(
    groups: Sequence[Sequence[Standing]],
    peers: Sequence[Peer],
    late: set[Rank],
    blocked: set[Rank],
) -> Standstill | None:
    """Where it ends if one follows who waits for whom: at ranks that wait for nobody who is late.

    None: nowhere, so they wait in a circle.
    """
    at: dict[Rank, list[int]] = {}
    for number, group in enumerate(groups):
        for standing in group:
            if standing.waits_at is not None:
                at.setdefault(standing.rank, []).append(number)
    pairs = {(peer.rank, peer.peer): peer.sends for peer in peers}
    open_: dict[Rank, set[Rank]] = {}
    for (rank, peer), sends in pairs.items():
        if pairs.get((peer, rank), sends) is sends:
            open_.setdefault(rank, set()).add(peer)
    lates = [set(_late(group)) for group in groups]
    seen, queue, ends = set(late), list(late), set[Rank]()
    while queue:
        rank = queue.pop()
        waits_for = open_.get(rank, set()).union(*(lates[number] for number in at.get(rank, ())))
        if rank in blocked and not waits_for:
            ends.add(rank)
        queue += waits_for - seen
        seen |= waits_for
    if not ends:
        return None
    numbers = Counter(number for rank in ends for number in at.get(rank, ()))
    if not numbers:
        return Standstill(shape=Shape.PAIR, ranks=tuple(sorted(ends)), waiting=tuple(sorted(ends)))
    group = groups[numbers.most_common(1)[0][0]]
    joined = {standing.rank for standing in group}
    return _about(Shape.JOINED, group, sorted(ends), joined)


def _all_wait(
    groups: Sequence[Sequence[Standing]],
    main: Sequence[Standing],
    late: set[Rank],
    blocked: set[Rank],
    size: int,
) -> Standstill:
    """Everybody on record waits."""
    if late:
        return _about(Shape.CIRCLE, main, sorted(late), blocked)
    ranks = {standing.rank for group in groups for standing in group}
    if absent := _absent(groups, ranks, size):
        return _about(Shape.ABSENT, main, absent, blocked)
    if unfinished := _unfinished(main):
        return _about(Shape.UNFINISHED, main, unfinished, blocked)
    return _about(Shape.JOINED, main, (), blocked)


def _held(
    groups: Sequence[Sequence[Standing]], holders: set[Rank], blocked: set[Rank], ranks: set[Rank]
) -> Standstill:
    """Somebody waits for nobody and is waited for."""
    group = next((g for g in groups if holders & set(_late(g))), groups[0])
    few = len(holders) <= max(1, int(FEW * len(ranks)))
    if few and len(ranks) > 2:
        return _about(Shape.LATE, group, sorted(holders), blocked)
    ahead = sorted(s.rank for s in group if s.waits_at is not None)
    return _about(Shape.AHEAD, group, ahead, blocked)


def _late(group: Sequence[Standing]) -> list[Rank]:
    """Members that have not called what others wait in."""
    waits = [s.waits_at for s in group if s.waits_at is not None]
    if not waits:
        return []
    first = min(waits)
    return [s.rank for s in group if s.enqueued is not None and s.enqueued < first]


def _different(group: Sequence[Standing]) -> Standstill | None:
    """The first collective that ranks of one group called differently."""
    seqs = sorted({seq for s in group for seq in s.calls})
    stuck = min((s.waits_at for s in group if s.waits_at is not None), default=None)
    for seq in seqs:
        if stuck is None or seq < stuck:
            continue
        calls = [(s.rank, s.calls[seq]) for s in group if seq in s.calls]
        kinds = Counter(_kind(call) for _, call in calls)
        if len(kinds) < 2:
            continue
        common = kinds.most_common(1)[0][0]
        other = next(item for item in calls if _kind(item[1]) != common)
        reference = next(item for item in calls if _kind(item[1]) == common)
        return Standstill(
            shape=Shape.DIFFERENT,
            group=group[0].group,
            seq=seq,
            ranks=tuple(sorted(rank for rank, call in calls if _kind(call) != common)),
            waiting=tuple(sorted(rank for rank, _ in calls)),
            size=_size(group),
            other=other,
            reference=reference,
        )
    return None


def _kind(call: Call) -> tuple[object, ...]:
    op = call.op.lower()
    return (op, call.numel_in, call.dtype) if op in _EVEN else (op,)


def _unfinished(group: Sequence[Standing]) -> list[Rank]:
    """Few whose device has not finished, or not begun, what that of the others has."""
    waits = {s.rank: s.waits_at for s in group}
    first = min((at for at in waits.values() if at is not None), default=None)
    if first is None or len(group) <= 3:
        return []
    behind = [rank for rank, at in waits.items() if at == first]
    if len(behind) < len(group):
        return sorted(behind) if len(behind) <= max(1, int(FEW * len(group))) else []
    states = {s.rank: s.calls[first].state for s in group if first in s.calls}
    begun = [rank for rank, state in states.items() if state is State.STARTED]
    idle = [rank for rank, state in states.items() if state is State.SCHEDULED]
    return sorted(idle) if begun and len(idle) <= max(1, int(FEW * len(group))) else []


def _absent(groups: Iterable[Sequence[Standing]], ranks: set[Rank], size: int) -> tuple[Rank, ...]:
    sets = {id(s.members): s.members for group in groups for s in group}
    known = {member for members in sets.values() for member in members}
    known |= {Rank(rank) for rank in range(size)}
    return tuple(sorted(known - ranks))


def _size(group: Sequence[Standing]) -> int:
    return max((len(s.members) for s in group), default=0) or len(group)


def _about(
    shape: Shape, group: Sequence[Standing], ranks: Iterable[Rank], blocked: set[Rank]
) -> Standstill:
    waits = [s.waits_at for s in group if s.waits_at is not None]
    seq = min(waits, default=None)
    calls = [s.calls[seq] for s in group if seq is not None and seq in s.calls]
    about = tuple(ranks)
    most = max((s.enqueued for s in group if s.enqueued is not None), default=0)
    least = min(
        (s.enqueued for s in group if s.rank in about and s.enqueued is not None), default=most
    )
    return Standstill(
        shape=shape,
        group=group[0].group if group else "",
        seq=seq,
        ranks=about,
        waiting=tuple(sorted(blocked)),
        size=_size(group),
        call=calls[0] if calls else None,
        behind=most - least,
    )
