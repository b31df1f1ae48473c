"""Flight recorder dumps of torch: which collectives each rank called, and how far they came.

One dump per rank, as a pickle (what torch writes at a time-out) or as JSON, of versions 2.x; gloo
leaves the state at "scheduled" and tells by `retired`. Also the report that torchfrtrace prints.
The same number means different things: SeqNum of the watchdog, "#214" of the desync report and the
collective_seq_id here are three counts, so nothing is compared across sources.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from everstep.diagnosis.activity import place_of
from everstep.diagnosis.findings import Finding, Place, Site
from everstep.diagnosis.frames import Frame
from everstep.diagnosis.hangs import finding_of, history
from everstep.diagnosis.headings import heading_of, heading_of_name, last_number_of_name
from everstep.diagnosis.jsontext import MALFORMED, documents
from everstep.diagnosis.standing import Call, Peer, Standing, State, standstill
from everstep.model import Rank, Value

_P2P = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
_MANY = 64 << 20
"""Bytes of one dump: a buffer of 2,000 entries with stacks has about 5 MB."""


class Record(Value, frozen=True, kw_only=True):
    """What one rank recorded."""

    place: Place
    rank: Rank | None
    machine: str | None = None
    standings: tuple[Standing, ...] = ()
    """With rank -1 if the dump does not say whose it is."""
    peers: tuple[Peer, ...] = ()


class _Plain(pickle.Unpickler):
    """Reads values that consist of built-in containers and scalars, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a flight record does not need {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError(f"a flight record has no persistent object {pid!r}")


def read(data: bytes, file: str) -> list[Record] | None:
    """The records of a file; None if it is no flight recorder's dump."""
    value = _value(data)
    try:
        found = list(_records_in(value, None))
    except RecursionError:
        return None
    if not found:
        return None
    named = heading_of_name(file)
    rank = named.rank if named.rank is not None else last_number_of_name(file)
    try:
        return [
            _record(dump, own if own is not None else (rank if len(found) == 1 else None), file)
            for own, dump in found
        ]
    except MALFORMED:
        return None


def _value(data: bytes) -> Any:
    start = data[:200].lstrip()[:1]
    try:
        if start in {b"{", b"["}:
            return list(documents(data.decode("utf-8", errors="replace")))
        if data[:1] == b"\x80" and len(data) <= _MANY:
            return _Plain(io.BytesIO(data)).load()
    except (*MALFORMED, pickle.UnpicklingError, EOFError, IndexError):
        return None
    return None


def _records_in(value: Any, rank: Rank | None) -> Iterator[tuple[Rank | None, dict[str, Any]]]:
    """Dumps at any depth, with the rank that a key around them names."""
    if isinstance(value, list):
        if value and all(isinstance(item, dict) and "profiling_name" in item for item in value):
            yield rank, {"entries": value}
            return
        for item in value:
            yield from _records_in(item, rank)
    elif isinstance(value, dict):
        own = value.get("rank", value.get("global_rank"))
        rank = Rank(own) if isinstance(own, int) else rank
        entries = value.get("entries")
        if isinstance(entries, list) and {"pg_status", "pg_config", "version"} & value.keys():
            yield rank, value
            return
        for key, item in value.items():
            if isinstance(item, dict | list):
                inner = Rank(int(key)) if str(key).isdigit() else heading_of(str(key)).rank
                yield from _records_in(item, inner if inner is not None else rank)


def _record(dump: Mapping[str, Any], rank: Rank | None, file: str) -> Record:
    entries = [entry for entry in dump.get("entries") or () if isinstance(entry, dict)]
    who = rank if rank is not None else Rank(-1)
    members = _members(dump)
    names = {str(e.get("pg_id", "")): _group_of(e) for e in entries}
    names.setdefault("0", "0")  # the default group's, by number and by name
    status = {
        names[str(key)]: value
        for key, value in (dump.get("pg_status") or {}).items()
        if isinstance(value, dict) and str(key) in names
    }
    groups: dict[str, dict[int, tuple[Call, bool]]] = {name: {} for name in status}
    peers = []
    for entry in entries:
        group = _group_of(entry)
        done = entry.get("state") == State.COMPLETED or bool(entry.get("retired"))
        if entry.get("is_p2p") or _P2P.search(str(entry.get("profiling_name"))):
            if not done and (peer := _peer(entry, who, members.get(group, ()))) is not None:
                peers.append(peer)
            continue
        seq = _int(entry.get("collective_seq_id", entry.get("seq_id")))
        if seq is not None:
            groups.setdefault(group, {})[seq] = (_call(entry), done)
    heading = heading_of_name(file)
    return Record(
        place=Place(file=file, line=1, text=f"flight record, {len(entries)} entries"),
        rank=rank,
        machine=str(dump["host_name"]) if dump.get("host_name") else heading.machine,
        standings=tuple(
            _standing(who, name, calls, status.get(name, {}), members.get(name, ()))
            for name, calls in groups.items()
        ),
        peers=tuple(peers),
    )


def _standing(
    rank: Rank,
    group: str,
    calls: Mapping[int, tuple[Call, bool]],
    status: Mapping[str, Any],
    members: tuple[Rank, ...],
) -> Standing:
    """The group's own status first: a buffer that was overrun no longer has what is stuck."""
    done = [seq for seq, (_, finished) in calls.items() if finished]
    pending = [seq for seq, (_, finished) in calls.items() if not finished]
    enqueued = [*calls, _known(status.get("last_enqueued_collective"))]
    completed = _known(status.get("last_completed_collective"))
    if completed is None:
        completed = min(pending) - 1 if pending else max(done, default=0)
    elif pending and done and min(pending) > max(done):
        completed = max(completed, *done)
    return Standing(
        rank=rank,
        group=group,
        members=members,
        enqueued=max((seq for seq in enqueued if seq is not None), default=None),
        completed=completed,
        calls={seq: call for seq, (call, _) in calls.items()},
    )


def _members(dump: Mapping[str, Any]) -> dict[str, tuple[Rank, ...]]:
    found = {}
    for name, config in (dump.get("pg_config") or {}).items():
        ranks = config.get("ranks") if isinstance(config, dict) else None
        numbers = re.findall(r"\d+", ranks) if isinstance(ranks, str) else ranks or ()
        found[str(name)] = tuple(Rank(int(number)) for number in numbers)
    return found


def _group_of(entry: Mapping[str, Any]) -> str:
    group = entry.get("process_group")
    if isinstance(group, list | tuple) and group:
        return str(group[0])
    return str(group if group is not None else entry.get("pg_id", "0"))


def _call(entry: Mapping[str, Any]) -> Call:
    state = entry.get("state")
    dtypes = entry.get("input_dtypes") or ()
    frames = [
        Frame(
            name=str(f.get("name", "")),
            file=str(f.get("filename", "")),
            line=_int(f.get("line")) or 0,
        )
        for f in entry.get("frames") or ()
        if isinstance(f, dict)
    ]
    return Call(
        op=str(entry.get("profiling_name", "?")).split(":")[-1].strip(),
        numel_in=_numel(entry.get("input_sizes")),
        numel_out=_numel(entry.get("output_sizes")),
        dtype=",".join(sorted({str(dtype) for dtype in dtypes})),
        state=State(state) if state in set(State) else State.SCHEDULED,
        at=place_of(frames),
    )


def _peer(entry: Mapping[str, Any], rank: Rank, members: Sequence[Rank]) -> Peer | None:
    """Ranks in the name are positions in the group, if its members are known."""
    found = _P2P.search(str(entry.get("profiling_name")))
    if not found:
        return None
    kind, _, other = found.groups()
    at = int(other)
    peer = members[at] if at < len(members) else Rank(at)
    return Peer(rank=rank, peer=peer, sends=kind == "send")


def _numel(sizes: Any) -> int | None:
    """Elements of all tensors of a call."""
    if not isinstance(sizes, list | tuple):
        return None
    total = 0
    for size in sizes:
        count = 1
        for length in size if isinstance(size, list | tuple) else (size,):
            count *= _int(length) or 0
        total += count
    return total


def _int(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _known(value: Any) -> int | None:
    """A sequence number of a status; -1 says that there is none."""
    number = _int(value)
    return None if number is None or number < 0 else number


def analyse(attempts: Sequence[Sequence[Record]], site: Site) -> list[Finding]:
    """What the records of each attempt tell; the last is the root, earlier ones confirm it."""
    findings = []
    for at, records in enumerate(attempts):
        whose = {record.rank: record for record in records if record.rank is not None}
        if not whose:
            continue
        found = standstill(
            [standing for record in whose.values() for standing in record.standings],
            [peer for record in whose.values() for peer in record.peers],
            site.size,
        )
        findings.append(finding_of("flight", found, site, next(iter(whose.values())).place, at))
    return history(findings)


class Flight:
    """Collects the records of a job and judges them at the end."""

    def __init__(self) -> None:
        self._records: dict[int, list[Record]] = {}

    def take(self, file: str, data: bytes, attempt: int = 0) -> bool:
        """Keep what a file holds; False if it is no flight record."""
        records = read(data, file)
        self._records.setdefault(attempt, []).extend(records or [])
        return records is not None

    def findings(self, site: Site) -> list[Finding]:
        """What all of them tell together."""
        runs = [run for at in sorted(self._records) for run in runs_of(self._records[at])]
        return analyse(runs, site)


def runs_of(records: Sequence[Record]) -> list[list[Record]]:
    """A rank that was recorded again, in another folder or file, was another attempt."""
    runs: list[list[Record]] = []
    for record in records:
        for run in runs:
            if all(other.rank != record.rank for other in run):
                run.append(record)
                break
        else:
            runs.append([record])
    return runs
