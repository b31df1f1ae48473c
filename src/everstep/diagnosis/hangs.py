"""What a standstill of ranks means: the sentence, the accused, the first action.

Used by flight.py, report.py and silence.py on what standing.py found.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from everstep.diagnosis.findings import Finding, Place, Site
from everstep.diagnosis.standing import Shape, Standstill
from everstep.diagnosis.words import Category, FirstAction, Grade, Role, RootClass
from everstep.model import Rank, Value


class _Take(Value, frozen=True, kw_only=True):
    root: RootClass
    action: FirstAction
    accuses: bool
    undecided: str


_TAKES = {
    Shape.LATE: _Take(
        root=RootClass.AMBIGUOUS,
        action=FirstAction.STOP_TIME_CHECK,
        accuses=True,
        undecided="a stack of the late rank: its loader, its storage, its driver or its code",
    ),
    Shape.AHEAD: _Take(
        root=RootClass.AMBIGUOUS,
        action=FirstAction.ASK_USER,
        accuses=False,
        undecided="stacks of both sides: one collective more on few ranks is uneven data or a"
        " branch of the code, unless something holds all others",
    ),
    Shape.DIFFERENT: _Take(
        root=RootClass.USER_CODE,
        action=FirstAction.ASK_USER,
        accuses=False,
        undecided="",
    ),
    Shape.CIRCLE: _Take(
        root=RootClass.USER_CODE,
        action=FirstAction.ASK_USER,
        accuses=False,
        undecided="the order in which the program uses its groups",
    ),
    Shape.UNFINISHED: _Take(
        root=RootClass.AMBIGUOUS,
        action=FirstAction.STOP_TIME_CHECK,
        accuses=True,
        undecided="a test of that device and of its links",
    ),
    Shape.JOINED: _Take(
        root=RootClass.AMBIGUOUS,
        action=FirstAction.STOP_TIME_CHECK,
        accuses=False,
        undecided="a test of links and devices: nobody is late, so it is the transport",
    ),
    Shape.PAIR: _Take(
        root=RootClass.AMBIGUOUS,
        action=FirstAction.STOP_TIME_CHECK,
        accuses=False,
        undecided="a test of the links between these machines: nobody is late",
    ),
    Shape.ABSENT: _Take(
        root=RootClass.AMBIGUOUS,
        action=FirstAction.STOP_TIME_CHECK,
        accuses=True,
        undecided="whether the processes of the ranks without a record still live",
    ),
    Shape.NOTHING: _Take(
        root=RootClass.AMBIGUOUS,
        action=FirstAction.STOP_TIME_CHECK,
        accuses=False,
        undecided="stacks of all ranks: they hang outside collectives, or not at all",
    ),
}


def finding_of(
    source: str, found: Standstill, site: Site, place: Place | None, attempt: int
) -> Finding:
    """The finding; `source` is the first half of its rule."""
    take = _TAKES[found.shape]
    accused = found.ranks if take.accuses and _sure(found, site) else ()
    return Finding(
        rule=f"{source}.{found.shape}",
        role=Role.ROOT,
        category=Category.JOB_HANG,
        root=take.root,
        grade=Grade.WAITING,
        action=take.action,
        why=_why(found),
        place=place,
        accused_ranks=accused,
        attempt=attempt,
        undecided=take.undecided,
    )


def _sure(found: Standstill, site: Site) -> bool:
    """One rank, or the ranks of one machine. Absent ranks may just not have been collected."""
    if len(found.ranks) == 1:
        return found.shape is not Shape.ABSENT or found.size > 2
    hosts = {site.host_of(rank) for rank in found.ranks}
    if found.shape is Shape.ABSENT:
        return len(hosts) == 1 and len(found.ranks) == site.ranks_per_machine
    return len(hosts) == 1 or len(found.ranks) <= max(1, found.size // 8)


_SENTENCES = {
    Shape.LATE: "{waiting} ranks wait in {seq} ({what}), which rank {who} has not called: {behind}"
    " behind the most advanced, and waiting for nobody",
    Shape.AHEAD: "{count} of {size} ranks ({who}) wait in {seq} ({what}), which the others have not"
    " called: those that wait are ahead, not guilty",
    Shape.DIFFERENT: "ranks called different things as {seq}: rank {one}, rank {two}: they went"
    " different ways in the code",
    Shape.CIRCLE: "ranks wait for each other in different groups (rank {who} is late in one and"
    " waits in another): the program uses its groups in different orders",
    Shape.UNFINISHED: "all called {seq} ({what}), and only rank {who} has not finished or begun it",
    Shape.JOINED: "all {waiting} ranks on record called {seq} ({what}), and none finished it",
    Shape.PAIR: "ranks {who} have a send and the receive that fits it pending, and the others wait"
    " for them",
    Shape.ABSENT: "all {waiting} ranks on record wait in {seq} ({what}); rank {who} left none",
    Shape.NOTHING: "no collective is pending on the {size} ranks on record",
}


def _why(found: Standstill) -> str:
    one, two = (f"{pair[0]} {pair[1]}" if pair else "" for pair in (found.other, found.reference))
    return _SENTENCES[found.shape].format(
        waiting=len(found.waiting),
        seq=f"collective {found.seq} of group {found.group or '0'}",
        what=found.call or "no longer on record",
        who=list_of(found.ranks),
        count=len(found.ranks),
        size=found.size,
        behind=found.behind,
        one=one,
        two=two,
    )


def list_of(ranks: Sequence[Rank]) -> str:
    """Ranks as a sentence names them."""
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")


def history(findings: Sequence[Finding]) -> list[Finding]:
    """The newest first, as the root; earlier ones confirm it or take its accusation back."""
    if not findings:
        return []
    last, before = findings[-1], findings[-2::-1]
    earlier = [each for each in before if each.rule == last.rule and each.accused_ranks]
    if earlier and last.accused_ranks:
        last = _again(last, earlier[0])
    return [last, *(msgspec.structs.replace(each, role=Role.CONFIRM) for each in before)]


def _again(last: Finding, before: Finding) -> Finding:
    if set(last.accused_ranks) & set(before.accused_ranks):
        return msgspec.structs.replace(
            last, why=f"{last.why}; it was rank {list_of(before.accused_ranks)} before, too"
        )
    return msgspec.structs.replace(
        last,
        why=f"{last.why}; before, it was rank {list_of(before.accused_ranks)}: another rank each"
        " time is no machine",
        accused_ranks=(),
        undecided="what changed before it began",
    )
