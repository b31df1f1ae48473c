"""What the collective ledger of a job means: who waited, who says nothing, who went another way.

`Ledger` collects the entries that ledger.py reads from lines and judges them at the end. A line of
a rank that waited proves only that this rank was there. So the ranks without a line are the
question, and their number decides: one of many holds the others; nearly all means that few went on
alone; in between nothing is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from everstep.diagnosis.busy import Busy, busy_of
from everstep.diagnosis.findings import NOBODY, Finding, Place, Site, Speaker
from everstep.diagnosis.hangs import finding_of, list_of
from everstep.diagnosis.ledger import DEFAULT, MARKS, UNNAMED, Entry, Kind, parse
from everstep.diagnosis.standing import Call, Shape, Standing, Standstill, standstill
from everstep.diagnosis.words import Category, FirstAction, Grade, Role, RootClass
from everstep.model import Rank

NEAR = 8
"""Ranks that are further apart than this, in an unnamed group, are in two groups."""
_NOWHERE = Place(file="", line=0, text="")


class Ledger:
    """Collects the lines of a job's logs and judges them at the end."""

    def __init__(self) -> None:
        self._entries: dict[Entry, Entry] = {}
        """By what they say: the same line again, from the same rank, is kept once."""
        self._position: Entry | None = None
        self._before: list[str] = []

    def line(self, text: str, place: Place, speaker: Speaker = NOBODY, attempt: int = 0) -> bool:
        """Take one line that has one of `MARKS`; True if somebody waits by it."""
        entry = parse(text, place, speaker)
        if entry is None:
            return False
        if entry.kind is Kind.POSITION:
            self._position = entry
        elif entry.kind is Kind.SNAPSHOT and self._position is not None:
            entry = msgspec.structs.replace(
                entry, enqueued=self._position.enqueued, completed=self._position.completed
            )
        entry = msgspec.structs.replace(entry, attempt=attempt)
        self._entries.setdefault(msgspec.structs.replace(entry, place=_NOWHERE), entry)
        return entry.kind is not Kind.SPOKE

    def before(self, text: str) -> None:
        """An ordinary line from shortly before a time-out: it may say what was being done."""
        self._before.append(text)

    def take(self, file: str, data: bytes, attempt: int = 0) -> bool:
        """A whole log at once. True if any line counts."""
        took = False
        recent: list[str] = []
        for number, text in enumerate(data.decode("utf-8", errors="replace").splitlines(), 1):
            place = Place(file=file, line=number, text=text.strip()[:200])
            if any(mark in text for mark in MARKS) and self.line(text, place, NOBODY, attempt):
                took = True
            elif not took:
                recent = [*recent[-5:], text]
        for text in recent:
            self.before(text)
        return took

    def findings(self, site: Site) -> list[Finding]:
        """What all lines tell together: at most one root."""
        if not self._entries:
            return []
        last = max(entry.attempt for entry in self._entries)
        entries = [entry for entry in self._entries.values() if entry.attempt == last]
        found = analyse(entries, site, busy_of(self._before))
        return [found] if found is not None else []


def analyse(entries: Sequence[Entry], site: Site, busy: Busy | None = None) -> Finding | None:
    """What the lines of one attempt tell. `busy`: what the ordinary lines before them speak of."""
    by_kind: dict[Kind, list[Entry]] = {}
    for entry in entries:
        by_kind.setdefault(entry.kind, []).append(entry)
    if Kind.DIFFERENT in by_kind:
        return _different(by_kind[Kind.DIFFERENT])
    if Kind.NEVER_CAME in by_kind:
        return _named(by_kind[Kind.NEVER_CAME], entries, site, busy)
    standings = _standings(entries)
    if (known := _known(standings)) is not None:
        return finding_of("ledger", known, site, entries[0].place, entries[0].attempt)
    waited = by_kind.get(Kind.TIMED_OUT) or by_kind.get(Kind.STATUS)
    if waited:
        return _stuck(by_kind, busy) or _by_count(waited, entries, standings, site, busy)
    return _counted(by_kind[Kind.COUNTED], busy) if Kind.COUNTED in by_kind else None


def _known(standings: Sequence[Standing]) -> Standstill | None:
    """What the ranks that speak show among themselves, whoever is silent."""
    if not standings:
        return None
    found = standstill(standings)
    if found.shape in {Shape.LATE, Shape.DIFFERENT, Shape.CIRCLE}:
        return found
    return _apart(standings)


def _standings(entries: Iterable[Entry]) -> list[Standing]:
    """Where ranks stand, from whatever says it of them; the status of a group counts most."""
    named = {
        (e.rank, e.seq): e.group for e in entries if e.kind is Kind.STATUS and e.rank is not None
    }
    found: dict[tuple[Rank, str], Standing] = {}
    for e in entries:
        if e.kind is Kind.SNAPSHOT and e.enqueued is not None and e.completed is not None:
            for rank in e.ranks:
                found[rank, "desync report"] = Standing(
                    rank=rank, group="desync report", enqueued=e.enqueued, completed=e.completed
                )
        if e.rank is None or e.kind not in {Kind.TIMED_OUT, Kind.STATUS}:
            continue
        group = (e.group or named.get((e.rank, e.seq), "")) or UNNAMED
        old = found.get((e.rank, group))
        found[e.rank, group] = _joined(old, e, e.rank, group)
    return list(found.values())


def _joined(old: Standing | None, entry: Entry, rank: Rank, group: str) -> Standing:
    enqueued = old.enqueued if old is not None else None
    completed = old.completed if old is not None else None
    calls = dict(old.calls) if old is not None else {}
    if entry.kind is Kind.STATUS:
        enqueued, completed = entry.enqueued, entry.completed
    elif entry.seq is not None:
        calls.setdefault(entry.seq, Call(op=entry.op, numel_in=entry.numel_in))
        if enqueued is None or completed is None:
            enqueued, completed = entry.seq, entry.seq - 1
    return Standing(rank=rank, group=group, enqueued=enqueued, completed=completed, calls=calls)


def _apart(standings: Sequence[Standing]) -> Standstill | None:
    """Ranks of one group stuck in different kinds of collective, each past the other's number."""
    stuck = [
        (s, s.calls[at], at)
        for s in standings
        if s.group in DEFAULT and (at := s.waits_at) is not None and at in s.calls
    ]
    kinds = Counter(call.op for _, call, _ in stuck)
    if len(kinds) < 2:
        return None
    numbers = [at for _, _, at in stuck]
    if max(numbers) - min(numbers) > NEAR and stuck[0][0].group == UNNAMED:
        return None
    common = kinds.most_common(1)[0][0]
    one = next(item for item in stuck if item[1].op != common)
    other = next(item for item in stuck if item[1].op == common)
    return Standstill(
        shape=Shape.DIFFERENT,
        group=stuck[0][0].group,
        seq=min(numbers),
        ranks=(one[0].rank,),
        size=len(stuck),
        other=(one[0].rank, _numbered(one[1], one[2])),
        reference=(other[0].rank, _numbered(other[1], other[2])),
    )


def _numbered(call: Call, at: int) -> Call:
    return Call(op=f"{call.op} (number {at})", numel_in=call.numel_in)


# Sentences


def _different(entries: Sequence[Entry]) -> Finding:
    entry = entries[0]
    return Finding(
        rule="ledger.fingerprint",
        role=Role.ROOT,
        category=Category.USER_CODE_ERROR,
        root=RootClass.USER_CODE,
        grade=Grade.CODE,
        action=FirstAction.ROLL_BACK_CODE,
        why=f"ranks called different things as the same collective ({entry.op}): they went"
        " different ways in the code; the rank that is compared with is no culprit",
        place=entry.place,
        speaker=entry.speaker,
        attempt=entry.attempt,
    )


def _named(
    entries: Sequence[Entry], all_entries: Sequence[Entry], site: Site, busy: Busy | None
) -> Finding:
    """Messages that wait for ranks by name; whoever says anything of the kind itself was there."""
    said = {entry.rank for entry in all_entries}
    ranks = sorted({rank for entry in entries for rank in entry.ranks if rank not in said})
    speakers = {entry.rank for entry in entries} - {None}
    size = max(
        site.size, max((e.world for e in all_entries), default=0), len(speakers) + len(ranks)
    )
    few = 0 < len(ranks) <= max(1, size // 4)
    what = "the communicator's id of" if entries[0].op == "communicator" else "a barrier for"
    text = f"{max(1, len(speakers))} ranks waited in vain in {what} rank {list_of(ranks)}"
    if not few:
        text += f": {len(ranks)} of {size}, too many to be the culprits"
    found = _hang("ledger.never_came", text, entries[0], busy, tuple(ranks) if few else ())
    if not any(entry.gone for entry in entries):
        return found
    return msgspec.structs.replace(
        found,
        rule="ledger.gone",
        category=Category.USER_CODE_ERROR,
        action=FirstAction.ASK_USER,
        why=f"{text}: its process had ended before",
        undecided="the output of that rank",
    )


def _by_count(
    waited: Sequence[Entry],
    entries: Sequence[Entry],
    standings: Sequence[Standing],
    site: Site,
    busy: Busy | None,
) -> Finding:
    """How many say that they waited, and how many say nothing."""
    first, size = waited[0], site.size
    heard = {entry.rank for entry in entries if entry.rank is not None}
    count = max(len(heard), *(entry.repeated for entry in waited))
    text = _waited(waited, standings, min(count, size) if size else count, size)
    silent = tuple(Rank(rank) for rank in range(size) if rank not in heard)
    group = next((entry.group for entry in entries if entry.group not in DEFAULT), "")
    if not size or (group and count <= size // 2):
        where = f", in group {group}" if group else ""
        return _hang("ledger.waited", f"{text}{where}", first, busy)
    if count >= size:
        return _hang("ledger.joined", f"{text}: all were there, nobody was late", first, busy)
    if count > len(heard):
        return _hang("ledger.silent", f"{text}, {size - count} did not, unnamed", first, busy)
    if len(silent) == 1 or _is_machine(silent, site):
        text += f", only rank {list_of(silent)} says nothing of it"
        accused = silent if size > 2 else ()
        return _hang("ledger.silent", text, first, busy, accused)
    if count <= size // 4 and not _is_machine(tuple(sorted(heard)), site):
        text += f", {len(silent)} say nothing of it: those that waited went on alone"
        return _hang("ledger.ahead", text, first, busy or Busy.UNKNOWN)
    return _hang("ledger.waited", f"{text}, {len(silent)} say nothing", first, busy)


def _waited(waited: Sequence[Entry], standings: Sequence[Standing], count: int, size: int) -> str:
    op = next((entry.op for entry in waited if entry.op), "a collective")
    numel = next((entry.numel_in for entry in waited if entry.numel_in is not None), None)
    number = next((s.waits_at for s in standings if s.waits_at is not None), None)
    what = op + (f" of {numel} elements" if numel is not None else "")
    what += f", number {number}," if number is not None else ""
    return (
        f"{count}{f' of {size}' if size else ''} ranks waited in {what} until their time was over"
    )


def _is_machine(ranks: Sequence[Rank], site: Site) -> bool:
    """Whether these are all ranks of one machine of several."""
    per = site.ranks_per_machine or 0
    return 0 < per == len(ranks) < site.size // 2 and len({rank // per for rank in ranks}) == 1


def _stuck(by_kind: Mapping[Kind, Sequence[Entry]], busy: Busy | None) -> Finding | None:
    """One rank whose watchdog itself hung, among others whose watchdogs only waited."""
    stuck = sorted({e.rank for e in by_kind.get(Kind.STUCK, ()) if e.rank is not None})
    waited = {e.rank for e in by_kind.get(Kind.TIMED_OUT, ())} - {None, *stuck}
    if len(stuck) != 1 or len(waited) < 2:
        return None
    text = (
        f"{len(waited)} ranks waited until their time was over, and the watchdog of rank {stuck[0]}"
        " hung itself: a call to the driver, or a thread that keeps the interpreter's lock"
    )
    return _hang("ledger.stuck", text, by_kind[Kind.STUCK][0], busy, tuple(stuck))


def _counted(entries: Sequence[Entry], busy: Busy | None) -> Finding:
    best = max(entries, key=lambda entry: entry.joined)
    missing = best.world - best.joined
    text = f"{best.joined} of {best.world} ranks came, {missing} did not, and nothing says which"
    return _hang("ledger.counted", text, best, busy)


def _hang(
    rule: str, text: str, entry: Entry, busy: Busy | None, accused: tuple[Rank, ...] = ()
) -> Finding:
    """With what was going on: a thing that a program does on purpose is no machine's fault."""
    code = busy is not None
    if busy is Busy.ENDING:
        accused = ()  # it had fewer batches, which is nobody's fault but the program's
    if busy is not None and busy is not Busy.UNKNOWN:
        text += f"; before, the log speaks of {busy}"
    return Finding(
        rule=rule,
        role=Role.ROOT,
        category=Category.JOB_HANG,
        root=RootClass.USER_CODE if code else RootClass.AMBIGUOUS,
        grade=Grade.WAITING,
        action=FirstAction.ASK_USER if code else FirstAction.STOP_TIME_CHECK,
        why=text,
        place=entry.place,
        speaker=entry.speaker,
        accused_ranks=accused,
        attempt=entry.attempt,
        repeated=entry.repeated,
        undecided="stacks or flight records of the ranks that printed nothing",
    )
