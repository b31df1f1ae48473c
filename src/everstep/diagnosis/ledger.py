"""The collective ledger: what single log lines say about where ranks stand.

logs.py hands over every line in which one of `MARKS` occurs, with its speaker; silence.py puts the
entries together. Numbers in brackets are ranks of the group, not of the job, unless the group is
the default one.
"""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec

from everstep.diagnosis.findings import NOBODY, Place, Speaker
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
    STUCK = "stuck"
    """This rank's own watchdog did not get on: a call hangs, or another thread holds it."""
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
_STUCK = re.compile(r"watchdog got stuck for \d+ seconds|Heartbeat monitor timed out")
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
UNNAMED = "?"
"""The group of lines that name none: older versions of torch."""
DEFAULT = frozenset({"", "0", UNNAMED})


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
    if speaker.rank is not None and _STUCK.search(text):
        return Entry(kind=Kind.STUCK, place=place, speaker=speaker)
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
        inner = found is not None and group not in DEFAULT and int(found["rank"]) == speaker.rank
        if label or not inner:
            return group, speaker
        speaker = msgspec.structs.replace(speaker, rank=None)
    bracket = _BRACKET.search(text)
    rank = None
    if label:
        rank = int(label.group(1))
    elif found and group in DEFAULT:
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
