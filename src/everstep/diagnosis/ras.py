"""What NCCL's RAS says (ncclras, as text or JSON): communicators, counts, processes without answer.

It lists the smaller group, whoever that is: ranks that are one operation ahead as well as ranks
that are behind. A mismatch is normal while a job works; only counts that stand still between two
queries show a hang. A process that does not answer is dead, stopped, or cut off: the one thing in
here that accuses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from everstep.diagnosis.findings import Finding, Place, Site
from everstep.diagnosis.jsontext import MALFORMED, documents
from everstep.diagnosis.words import Category, FirstAction, Grade, Role, RootClass
from everstep.model import Rank, Value

FEW = 0.25
"""More ranks than this share of a communicator are no outliers in it."""
_STATES = "status"
_START = re.compile(r"^NCCL version \S+ compiled with CUDA|^Job summary\s*$")
_COMM = re.compile(r"^#(\d+-\d+) \((\w+)\) (\w+)")
_OPS = re.compile(r"Communicator ranks have different (\w+) operation counts")
_STATUS = re.compile(r"Communicator ranks have different status")
_MANY = re.compile(
    r"^\s*(\d+) ranks have (?:launched up to operation (\d+)|status (\w+)|not launched)"
)
_ONE = re.compile(
    r"^\s*Rank (\d+) has (?:launched up to operation (\d+)|status (\w+)|not launched\w*.*?)"
    r" -- GPU \S+ managed by process (\d+) on node (\S+)"
)
_LISTED = re.compile(r"^\s*Rank (\d+) -- GPU \S+ managed by process (\d+) on node (\S+)")
_MISSING = re.compile(r"^\s*The missing ranks?: (.*)")
_PROCESS = re.compile(r"^\s*Process (\d+) on node (\S+) managing GPUs? (.*)")
_GONE = re.compile(r"^(DEAD|INCOMPLETE)\b")
_EVENT = re.compile(r"\b(PEER_DEAD|PEER_UNRESPONSIVE)\b: Process (\d+) on node (\S+)")
_TOTAL = re.compile(r"^\s*\d+\s+\d+(?:-\d+)?\s+\d+(?:-\d+)?\s+(\d+)\s+(\d+)\s*$")


class Member(Value, frozen=True, kw_only=True):
    """One rank of a communicator."""

    rank: Rank
    node: str
    pid: int = 0


class Count(Value, frozen=True, kw_only=True):
    """Ranks of one communicator that came equally far in one kind of operation."""

    operation: int
    ranks: int
    listed: tuple[Member, ...] = ()
    """Those that are named."""


class Comm(Value, frozen=True, kw_only=True):
    """What one communicator's entry says."""

    name: str
    op: str = ""
    counts: tuple[Count, ...] = ()
    missing: tuple[Rank, ...] = ()
    """Ranks of the communicator, which are ranks of the job only in the largest one."""


class Query(Value, frozen=True, kw_only=True):
    """One answer of RAS."""

    place: Place
    comms: tuple[Comm, ...] = ()
    dead: tuple[str, ...] = ()
    """Nodes of processes that are considered dead, one for each process."""
    silent: tuple[str, ...] = ()
    """Nodes of processes that did not answer."""
    ranks: int = 0
    ok: bool = True
    """No communicator has an error."""


def read(text: str, file: str) -> list[Query] | None:
    """All answers that a text holds, in its order; None if it holds none."""
    if (answers := _from_json(text, file)) is not None:
        return answers
    if "Job summary" not in text and "Communicators..." not in text and not _EVENT.search(text):
        return None
    starts: list[int] = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if _START.match(line) and (not starts or number - starts[-1] > 8):
            starts.append(number)
    events = [m for line in lines if (m := _EVENT.search(line))]
    queries = [
        _query(lines[start:end], file, start + 1) for start, end in pairwise([*starts, len(lines)])
    ]
    if events and not queries:
        place = Place(file=file, line=1, text=events[0].group()[:200])
        queries = [Query(place=place, dead=tuple(m.group(3) for m in events), ok=False)]
    return queries or None


def _query(lines: Sequence[str], file: str, start: int) -> Query:
    comms: list[Comm] = []
    gone: dict[str, list[str]] = {"DEAD": [], "INCOMPLETE": []}
    kind, ranks, ok = "", 0, True
    for line in lines:
        ok = ok and not re.search(r"\b(?:RUNNING|ABORT|INIT|FINALIZE)\S*\s+(?!OK)[A-Z]{3,}", line)
        if match := _TOTAL.match(line):
            ranks = max(ranks, int(match.group(2)))
        if match := _COMM.match(line):
            comms.append(Comm(name=f"#{match.group(1)}"))
            kind = ""
        elif match := _GONE.match(line):
            kind = match.group(1)
        elif (match := _PROCESS.match(line)) and kind:
            gone[kind].append(match.group(2))
        elif comms:
            comms[-1] = _further(comms[-1], line)
    place = next((n for n, line in enumerate(lines) if _COMM.match(line) or _GONE.match(line)), 0)
    return Query(
        place=Place(file=file, line=start + place, text=lines[place].strip()[:200]),
        comms=tuple(comms),
        dead=tuple(gone["DEAD"]),
        silent=tuple(gone["INCOMPLETE"]),
        ranks=ranks,
        ok=ok and not any(gone.values()) and not comms,
    )


def _further(comm: Comm, line: str) -> Comm:
    """The communicator with what one more line says of it."""
    op, counts, missing = comm.op, comm.counts, comm.missing
    if match := _OPS.search(line):
        op = match.group(1)
    elif _STATUS.search(line):
        op = _STATES
    elif match := _MANY.match(line):
        counts = (*counts, Count(operation=int(match.group(2) or 0), ranks=int(match.group(1))))
    elif match := _ONE.match(line):
        rank, operation, _, pid, node = match.groups()
        member = Member(rank=Rank(int(rank)), node=node, pid=int(pid))
        counts = (*counts, Count(operation=int(operation or 0), ranks=1, listed=(member,)))
    elif (match := _LISTED.match(line)) and counts:
        last = counts[-1]
        rank, pid, node = match.groups()
        listed = (*last.listed, Member(rank=Rank(int(rank)), node=node, pid=int(pid)))
        counts = (*counts[:-1], Count(operation=last.operation, ranks=last.ranks, listed=listed))
    elif match := _LISTED.match(line):
        missing = (*missing, Rank(int(match.group(1))))
    elif match := _MISSING.match(line):
        missing = tuple(Rank(int(number)) for number in re.findall(r"\d+", match.group(1)))
    return Comm(name=comm.name, op=op, counts=counts, missing=missing)


def _from_json(text: str, file: str) -> list[Query] | None:
    answers = [
        answer
        for value in documents(text)
        for answer in (value if isinstance(value, list) else [value])
    ]
    try:
        return [_query_of(answer, file) for answer in answers if _is_answer(answer)] or None
    except MALFORMED:
        return None


def _is_answer(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("communicators"), list)


def _query_of(answer: Mapping[str, Any], file: str) -> Query:
    comms: list[Comm] = []
    dead: list[str] = []
    silent: list[str] = []
    ranks = 0
    for number, comm in enumerate(answer["communicators"]):
        present = [rank for rank in comm.get("ranks") or () if isinstance(rank, dict)]
        missing = [rank for rank in comm.get("missing_ranks") or () if isinstance(rank, dict)]
        ranks = max(ranks, len(present) + len(missing))
        comms += _comms(f"#{number}", present, missing)
        for rank in missing:
            status = rank.get("status") or {}
            (dead if status.get("considered_dead") else silent).append(str(rank.get("host", "?")))
    return Query(
        place=Place(file=file, line=1, text=f"RAS at {answer.get('timestamp', '?')}"),
        comms=tuple(comms),
        dead=tuple(dead),
        silent=tuple(silent),
        ranks=ranks,
        ok=not (dead or silent) and all(len(comm.counts) < 2 for comm in comms),
    )


def _comms(
    name: str, present: Sequence[Mapping[str, Any]], missing: Sequence[Mapping[str, Any]]
) -> Iterator[Comm]:
    """A communicator, once for each kind of operation, as the text would list uneven ones."""
    absent = tuple(Rank(int(rank["rank"])) for rank in missing if "rank" in rank)
    ops = sorted({op for rank in present for op in rank.get("collective_counts") or ()})
    found = False
    for op in ops:
        by: dict[int, list[Member]] = {}
        for rank in present:
            count = int((rank.get("collective_counts") or {}).get(op, 0))
            by.setdefault(count, []).append(
                Member(
                    rank=Rank(int(rank["rank"])),
                    node=str(rank.get("host", "?")),
                    pid=int(rank.get("pid") or 0),
                )
            )
        found = True
        counts = (
            Count(operation=count, ranks=len(who), listed=tuple(who))
            for count, who in sorted(by.items(), key=lambda item: -len(item[1]))
        )
        yield Comm(name=name, op=op, counts=tuple(counts), missing=absent)
    if absent and not found:
        yield Comm(name=name, missing=absent)


# What that means


class _Take(Value, frozen=True, kw_only=True):
    rule: str
    why: str
    root: RootClass = RootClass.AMBIGUOUS
    action: FirstAction = FirstAction.STOP_TIME_CHECK
    ranks: tuple[Rank, ...] = ()
    machines: tuple[str, ...] = ()
    undecided: str = ""


def analyse(attempts: Sequence[Sequence[Query]], site: Site) -> list[Finding]:
    """What the answers tell; those of one attempt are taken as queries of one run, in order."""
    findings = []
    for at, queries in enumerate(attempts):
        if queries and (take := _judge(queries, site)) is not None:
            findings.append(_finding(take, queries[-1], at))
    return findings[::-1]


def _judge(queries: Sequence[Query], site: Site) -> _Take | None:
    last = queries[-1]
    if last.dead or last.silent:
        return _gone(last, site)
    if moved := _moved(queries):
        return _Take(
            rule="ras.moves",
            why=f"the counts went on between two queries ({moved}): the job works",
            root=RootClass.NONE,
            action=FirstAction.NONE,
        )
    uneven = [comm for comm in last.comms if len(comm.counts) > 1 and comm.op != _STATES]
    if not uneven:
        return _states(last) or (_even(last) if last.ok else None)
    return _behind(uneven, len(queries), site)


def _states(query: Query) -> _Take | None:
    """Ranks of one communicator in different states: some have given up already."""
    comm = next((comm for comm in query.comms if comm.op == _STATES), None)
    if comm is None:
        return None
    parts = " and ".join(str(count.ranks) for count in comm.counts)
    return _Take(
        rule="ras.states",
        why=f"{parts} ranks of communicator {comm.name} are in different states: some gave up"
        " before the others, which names no first",
        undecided="the logs of the ranks that gave up: their first error",
    )


def _gone(query: Query, site: Site) -> _Take:
    gone = query.dead or query.silent
    nodes = sorted(set(gone))
    large = max(query.comms, key=lambda c: len(c.missing), default=Comm(name=""))
    what = "are considered dead" if query.dead else "do not answer"
    known = len(nodes) == 1 and _is_machine(nodes[0], site)
    return _Take(
        rule="ras.dead" if query.dead else "ras.silent",
        why=f"{len(gone)} of {query.ranks or 'all'} processes, on {', '.join(nodes[:4])}, {what}"
        + (f": rank {_list(large.missing)} of communicator {large.name}" if large.missing else ""),
        ranks=large.missing if len(nodes) == 1 and _of_the_job(query, site) else (),
        machines=tuple(nodes) if known else (),
        undecided="whether the processes live: dead, stopped or cut off look the same",
    )


def _is_machine(node: str, site: Site) -> bool:
    return node in site.hosts or not re.fullmatch(r"[\d.]+|[0-9a-f:]+", node)


def _of_the_job(query: Query, site: Site) -> bool:
    """Whether ranks of its communicator are ranks of the job: it holds all of them."""
    return site.size == 0 or query.ranks in {0, site.size}


def _moved(queries: Sequence[Query]) -> str:
    """A count that went on, empty if none did."""
    for before, after in pairwise(queries):
        old = {(c.name, c.op): max(k.operation for k in c.counts) for c in before.comms if c.counts}
        for comm in after.comms:
            if not comm.counts:
                continue
            now = max(count.operation for count in comm.counts)
            then = old.get((comm.name, comm.op))
            if then is not None and now > then:
                return f"{comm.op} {then} to {now}"
        if old and after.ok:
            return "the mismatch is gone"
    return ""


def _even(query: Query) -> _Take:
    return _Take(
        rule="ras.even",
        why=f"RAS shows all {query.ranks or ''} ranks running and equally far: nobody is behind",
        undecided="a second query: whether the counts go on; stacks of all ranks",
    )


def _behind(uneven: Sequence[Comm], queries: int, site: Site) -> _Take:
    """Somebody launched less. Who waits in one communicator is behind in another one, too."""
    comm = max(uneven, key=lambda comm: sum(count.ranks for count in comm.counts))
    counts = sorted(comm.counts, key=lambda count: count.operation)
    least, most = counts[0], counts[-1]
    total = sum(count.ranks for count in counts)
    text = (
        f"{most.ranks} of {total} ranks launched {comm.op} {most.operation},"
        f" {least.ranks} only {least.operation}"
    )
    text += f", and {queries} queries show the same" if queries > 1 else ", in one query"
    late = least.listed
    few = len(late) == least.ranks <= max(1, int(FEW * total)) and total > 2
    alone = all({m.pid for m in late} <= _late(other) for other in uneven)
    one = len({member.node for member in late}) == 1
    if few and alone and one and (queries > 1 or most.operation - least.operation > 1):
        ranks = tuple(sorted(member.rank for member in late))
        return _Take(
            rule="ras.behind",
            why=f"{text}: rank {_list(ranks)} on {late[0].node} holds the others",
            ranks=ranks if site.size in {0, total} else (),
            undecided="a stack of the rank behind: its loader, its storage, its driver or its code",
        )
    if most.listed and most.ranks < total // 2:
        names = _list([member.rank for member in most.listed])
        text += f"; rank {names} is listed because few are ahead"
    return _Take(
        rule="ras.split",
        why=f"{text}: who holds the ranks behind is not shown",
        undecided="stacks of the ranks behind"
        + ("" if queries > 1 else "; a second query: a mismatch is normal while a job works"),
    )


def _late(comm: Comm) -> set[int]:
    """Processes of a communicator that are named and behind."""
    least = min(comm.counts, key=lambda count: count.operation)
    return {member.pid for member in least.listed}


def _finding(take: _Take, query: Query, attempt: int) -> Finding:
    healthy = take.root is RootClass.NONE
    return Finding(
        rule=take.rule,
        role=Role.NOISE if healthy else Role.ROOT,
        category=Category.NONE if healthy else Category.JOB_HANG,
        root=take.root,
        grade=Grade.WAITING,
        action=take.action,
        why=take.why,
        place=query.place,
        accused_ranks=take.ranks,
        accused_machines=take.machines,
        attempt=attempt,
        undecided=take.undecided,
    )


def _list(ranks: Sequence[Rank]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")


class Ras:
    """Collects the answers of RAS for a job and judges them at the end."""

    def __init__(self) -> None:
        self._queries: dict[int, list[Query]] = {}

    def take(self, file: str, data: bytes, attempt: int = 0) -> bool:
        """Keep what a text holds; False if it is no answer of RAS."""
        queries = read(data.decode("utf-8", errors="replace"), file)
        self._queries.setdefault(attempt, []).extend(queries or [])
        return queries is not None

    def findings(self, site: Site) -> list[Finding]:
        """What all of them tell together."""
        return analyse([self._queries[at] for at in sorted(self._queries)], site)
