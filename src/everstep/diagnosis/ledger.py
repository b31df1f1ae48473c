"""The collective ledger: what log lines of waiting ranks say about where each rank stands.

logs.py hands over every line in which one of `MARKS` occurs, with its speaker; `Ledger` puts them
together. A watchdog's line proves only that its own rank was there. So the ranks without a line are
the question, and their number decides: one of many holds the others; nearly all means that few went
on alone; in between nothing is known. Numbers in brackets are ranks of the group, not of the job,
unless the group is the default one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from everstep.diagnosis.busy import Busy, busy_of
from everstep.diagnosis.findings import NOBODY, Finding, Place, Site, Speaker
from everstep.diagnosis.hangs import finding_of, list_of
from everstep.diagnosis.standing import Call, Shape, Standing, Standstill, standstill
from everstep.diagnosis.words import Category, FirstAction, Grade, Role, RootClass
from everstep.model import Rank, Value

MARKS = (
    "ProcessGroup",
    "gloo/transport",
    "NCCL WARN",
    "DistBackendError",
    "Timed out waiting",
    "collective operation timeout",
    "ast enqueued",
    "started ranks:",
    "finished ranks:",
    "] started ",
    "] finished ",
    "CollectiveFingerPrint",
    "monitoredBarrier",
    "retrieving ncclUniqueId from",
    "in store based barrier",
    "clients joined",
    "tasks that reached the barrier",
    "/task:",
)
"""Of which each line that counts has one."""


class Kind(StrEnum):
    """What a line says."""

    TIMED_OUT = "timed_out"
    """This rank waited in this collective until its time was over."""
    STATUS = "status"
    """What this rank has called and finished in this group."""
    NEVER_CAME = "never_came"
    """Others waited for the named ranks in vain."""
    COUNTED = "counted"
    """So many of so many came."""
    DIFFERENT = "different"
    """Two ranks called different things as the same collective."""
    SNAPSHOT = "snapshot"
    """The desync report's: these ranks stand there."""
    POSITION = "position"
    """The head of lines of a snapshot."""
    SPOKE = "spoke"
    """A consequence on this rank: it was there, whatever happened."""


class Entry(Value, frozen=True, kw_only=True):
    """What one line says."""

    kind: Kind
    place: Place
    speaker: Speaker = NOBODY
    group: str = ""
    """As torch names it; empty: the line does not say."""
    seq: int | None = None
    op: str = ""
    numel_in: int | None = None
    enqueued: int | None = None
    completed: int | None = None
    ranks: tuple[Rank, ...] = ()
    """Those a message names."""
    gone: bool = False
    """The connection to those ranks broke: they had ended, and were not merely late."""
    joined: int = 0
    world: int = 0
    repeated: int = 1
    attempt: int = 0

    @property
    def rank(self) -> Rank | None:
        return self.speaker.rank


_TIMED_OUT = re.compile(
    r"Watchdog caught collective operation timeout: Work\w+"
    r"\(SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+)(?:, NumelIn=(?P<numel>\d+))?"
)
_GLOO = re.compile(r"Timed out waiting \d+ms for (?:recv|send) operation to complete")
_SPOKE = re.compile(
    r"ProcessGroup\w+\.cpp|gloo/transport|NCCL WARN|DistBackendError|DistNetworkError"
)
_STATUS = re.compile(
    r"[Ll]ast enqueued (?:\w+ )?work: (?P<enqueued>-?\d+),"
    r"(?: last started (?:\w+ )?work: -?\d+,)? last completed (?:\w+ )?work: (?P<completed>-?\d+)"
)
_WORK = re.compile(r"at (?:work sequence id|work|\w+ work): (?P<seq>\d+)")
_GROUP = re.compile(
    r"\[PG (?:ID (?P<id>\d+) PG GUID )?(?P<guid>\w+) ?(?:\((?P<desc>[^)]*)\))? Rank (?P<rank>\d+)\]"
)
_LABEL = re.compile(r"(?:^|\s|\])\[rank ?(\d+)\]:?")
_BRACKET = re.compile(r"\[Rank (\d+)\]")
_FINGERPRINT = re.compile(
    r"Rank (?P<a>\d+) is running (?:inconsistent )?collective: CollectiveFingerPrint\("
    r"(?:SequenceNumber=(?P<seq>\d+)\w*, ?)?(?P<what>OpType=\w+(?:, TensorShape=\[[^\]]*\])?)"
    r".*?but Rank (?P<b>\d+) is running (?:inconsistent )?collective: CollectiveFingerPrint\("
    r"(?:SequenceNumber=\d+\w*, ?)?(?P<other>OpType=\w+(?:, TensorShape=\[[^\]]*\])?)"
)
_BARRIER = re.compile(r"Ranks? (?P<ranks>[\d, ]+) failed to pass monitoredBarrier in")
_UNIQUE = re.compile(
    r"\[(?P<me>\d+)\] is setting up NCCL communicator and retrieving ncclUniqueId"
    r" from \[(?P<from>\d+)\].*store->get"
)
_STORE = re.compile(
    r"in store based barrier.*?rank: (?P<me>\d+).*?world_size=(?P<world>\d+)"
    r".*?(?:worker_count|num_workers_joined)=(?P<joined>\d+)"
)
_CLIENTS = re.compile(r"waiting for clients\. (?P<joined>\d+)/(?P<world>\d+) clients joined")
_TASK_COUNT = re.compile(r"tasks that reached the barrier: (?P<joined>\d+)/(?P<world>\d+)")
_TASK = re.compile(r"^/job:\w+/(?:replica:\d+/)?task:(?P<rank>\d+)$")
_POSITION = re.compile(r"^\s*#(?P<seq>\d+) (?P<state>started|finished) ranks:")
_SNAPSHOT = re.compile(r"^\s*\[(?P<ranks>[\d, ]+)\] (?P<state>started|finished) (?P<op>\w+)\s*$")
_GONE = re.compile(r"Connection reset|Broken pipe|failed to recv|Connection closed")
_REPEATED = re.compile(r"\[repeated (\d+)x across cluster\]")
_NOWHERE = Place(file="", line=0, text="")
UNNAMED = "?"
"""The group of lines that name none: older versions of torch."""
NEAR = 8
"""Ranks that are further apart than this, in an unnamed group, are in two groups."""
_DEFAULT = frozenset({"", "0", UNNAMED})


def parse(text: str, place: Place, speaker: Speaker = NOBODY) -> Entry | None:
    """What one line says, None if it says nothing of the kind.

    `text` is the line with or without its labels; ranks in brackets count only where `speaker` has
    none and the group is the default one.
    """
    found = _of_itself(text, place, speaker)
    if found is None:
        return None
    repeated = _REPEATED.search(text)
    return msgspec.structs.replace(found, repeated=int(repeated.group(1)) + 1 if repeated else 1)


def _of_itself(text: str, place: Place, speaker: Speaker) -> Entry | None:
    group, speaker = _who(text, speaker)
    if match := _TIMED_OUT.search(text):
        numel = match["numel"]
        return Entry(
            kind=Kind.TIMED_OUT,
            place=place,
            speaker=speaker,
            group=group,
            seq=int(match["seq"]),
            op=match["op"],
            numel_in=int(numel) if numel else None,
        )
    if match := _STATUS.search(text):
        work = _WORK.search(text)
        return Entry(
            kind=Kind.STATUS,
            place=place,
            speaker=speaker,
            group=group,
            seq=int(work["seq"]) if work else None,
            enqueued=int(match["enqueued"]),
            completed=int(match["completed"]),
        )
    if _GLOO.search(text):
        return Entry(kind=Kind.TIMED_OUT, place=place, speaker=speaker, op="a collective of gloo")
    other = _of_others(text, place, speaker) or _of_snapshot(text, place, speaker)
    if other is None and speaker.rank is not None and _SPOKE.search(text):
        return Entry(kind=Kind.SPOKE, place=place, speaker=speaker)
    return other


def _who(text: str, speaker: Speaker) -> tuple[str, Speaker]:
    """The group of a line, and its speaker with the rank, if the line says both."""
    found = _GROUP.search(text)
    group = ""
    if found:
        name = found["guid"]
        group = (
            "0" if found["desc"] == "default_pg" or (name == "0" and not found["desc"]) else name
        )
    label = _LABEL.search(text)
    if speaker.rank is not None:
        inner = found is not None and group not in _DEFAULT and int(found["rank"]) == speaker.rank
        if label or not inner:
            return group, speaker
        speaker = msgspec.structs.replace(speaker, rank=None)
    bracket = _BRACKET.search(text)
    rank = None
    if label:
        rank = int(label.group(1))
    elif found and group in _DEFAULT:
        rank = int(found["rank"])
    elif bracket and not found:
        rank = int(bracket.group(1))
    if rank is not None:
        speaker = msgspec.structs.replace(speaker, rank=Rank(rank))
    return group, speaker


def _of_others(text: str, place: Place, speaker: Speaker) -> Entry | None:
    """Lines that speak of other ranks."""
    if match := _FINGERPRINT.search(text):
        ranks = _numbers(f"{match['a']} {match['b']}")
        said = f"rank {match['a']} {match['what']}, rank {match['b']} {match['other']}"
        seq = int(match["seq"]) if match["seq"] else None
        return Entry(
            kind=Kind.DIFFERENT, place=place, speaker=speaker, ranks=ranks, op=said, seq=seq
        )
    if match := _BARRIER.search(text):
        ranks = _numbers(match["ranks"])
        return Entry(kind=Kind.NEVER_CAME, place=place, speaker=speaker, ranks=ranks, op="barrier")
    if match := _UNIQUE.search(text):
        ranks = _numbers(match["from"])
        if speaker.rank is None:
            speaker = msgspec.structs.replace(speaker, rank=Rank(int(match["me"])))
        return Entry(
            kind=Kind.NEVER_CAME,
            place=place,
            speaker=speaker,
            ranks=ranks,
            op="communicator",
            gone=_GONE.search(text) is not None,
        )
    for pattern in (_STORE, _CLIENTS, _TASK_COUNT):
        if match := pattern.search(text):
            return Entry(
                kind=Kind.COUNTED,
                place=place,
                speaker=speaker,
                joined=int(match["joined"]),
                world=int(match["world"]),
            )
    return None


def _of_snapshot(text: str, place: Place, speaker: Speaker) -> Entry | None:
    """Lines of reports that speak of several ranks."""
    if match := _POSITION.search(text):
        seq = int(match["seq"])
        done = seq if match["state"] == "finished" else seq - 1
        return Entry(kind=Kind.POSITION, place=place, speaker=speaker, enqueued=seq, completed=done)
    if match := _SNAPSHOT.search(text):
        ranks = _numbers(match["ranks"])
        return Entry(kind=Kind.SNAPSHOT, place=place, speaker=speaker, ranks=ranks, op=match["op"])
    if match := _TASK.match(text.strip()):
        ranks = _numbers(match["rank"])
        return Entry(kind=Kind.NEVER_CAME, place=place, speaker=speaker, ranks=ranks, op="barrier")
    return None


def _numbers(text: str) -> tuple[Rank, ...]:
    return tuple(Rank(int(number)) for number in re.findall(r"\d+", text))


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
    if waited := by_kind.get(Kind.TIMED_OUT) or by_kind.get(Kind.STATUS):
        return _by_count(waited, entries, standings, site, busy)
    if Kind.COUNTED in by_kind:
        return _counted(by_kind[Kind.COUNTED], busy)
    return None


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
        if s.group in _DEFAULT and (at := s.waits_at) is not None and at in s.calls
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
    group = next((entry.group for entry in entries if entry.group not in _DEFAULT), "")
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
