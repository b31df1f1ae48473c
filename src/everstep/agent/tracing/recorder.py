"""Asks ranks for torch's flight record, and says how far they are in each of their groups.

A rank whose script is attached serves it (trainer/recording.py). diagnosis/flight.py reads it; here
it is freed of what would mislead, and ranks of this machine that stand alike become one `Stood`.
Used by tracer.py.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from everstep.agent.tracing import kernel
from everstep.diagnosis import flight
from everstep.diagnosis.jsontext import MALFORMED
from everstep.diagnosis.standing import Peer, Standing
from everstep.files import FileUnreadable, read_json
from everstep.looks import Ranges, Stood, ranges_of, ranks_in
from everstep.model import EverstepError, Generation, Rank
from everstep.trainer.recording import RANGES_MAX, Recorder, file_of, socket_of

BYTES_MAX = 64 << 20
"""2,000 entries are one megabyte."""
CALLS_MAX = 4
"""Unfinished collectives of a group that are told, the first ones: where it stands is there."""
PEERS_MAX = 64
"""Pending sends and receives of one rank that are told."""
_REQUEST = (
    b"POST /handler/fr_trace_json HTTP/1.1\r\nHost: rank\r\nConnection: close\r\n"
    b"Content-Length: 0\r\n\r\n"
)
_Entry = dict[str, Any]


class _Dump(msgspec.Struct):
    """What is used of torch's answer."""

    version: str = ""
    pg_status: dict[str, _Entry] = {}
    pg_config: dict[str, _Entry] = {}
    entries: list[_Entry] = []


class Stands(NamedTuple):
    """How far one rank is."""

    rank: Rank
    standings: tuple[Standing, ...] = ()
    peers: tuple[Peer, ...] = ()
    members: dict[str, Ranges] = {}
    """Of groups, by name."""


class NoRecord(EverstepError):
    """A rank that serves its flight record did not give it."""


async def ask(shm: Path, local_rank: int, rank: Rank, generation: Generation) -> Stands | None:
    """None: it serves none, or does not answer anybody now. The caller sets the time limit.

    NoRecord says why there is none although there should be.
    """
    try:
        told = await asyncio.to_thread(read_json, file_of(shm, local_rank), Recorder)
    except FileUnreadable:
        return None
    process = kernel.entry(told.pid)
    if told.generation != generation or process is None or process.state in kernel.HELD:
        return None
    body = await _post(shm, socket_of(shm, local_rank))
    return await asyncio.to_thread(_read, body, rank, told)


async def _post(shm: Path, name: str) -> bytes:
    try:
        directory = os.open(shm, os.O_PATH | os.O_CLOEXEC)
        try:
            reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{directory}/{name}")
        finally:
            os.close(directory)
    except OSError as problem:
        raise NoRecord(f"its flight record cannot be had: {problem.strerror}") from problem
    try:
        writer.write(_REQUEST)
        answer = bytearray()
        while (part := await reader.read(1 << 20)) and len(answer) < BYTES_MAX:
            answer += part
    except OSError as problem:
        raise NoRecord(f"its flight record broke off: {problem.strerror}") from problem
    finally:
        writer.close()
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise NoRecord(f"torch's server answered {head[:80]!r}")
    return body


def _read(body: bytes, rank: Rank, told: Recorder) -> Stands:
    members = {group.name: group.members for group in told.groups}
    try:
        dump = msgspec.json.decode(body, type=_Dump)
        mended = msgspec.json.encode(_mended(dump, members))
    except (msgspec.MsgspecError, *MALFORMED) as problem:
        raise NoRecord(f"its flight record is none: {problem}") from problem
    records = flight.read(mended, f"rank-{rank}.json") or ()
    return Stands(
        rank=rank,
        standings=tuple(replace(each, rank=rank) for r in records for each in r.standings),
        peers=tuple(replace(each, rank=rank) for r in records for each in r.peers)[:PEERS_MAX],
        members=members,
    )


def _mended(dump: _Dump, members: dict[str, Ranges]) -> _Dump:
    """Smaller, with the members of groups, and without what counts something else.

    gloo's status counts sends and receives as well, of which ranks of one group have different
    numbers; its entries have both counts, so a group that uses both is judged by them alone.
    """
    mixed = {
        str(each.get("pg_id"))
        for each in dump.entries
        if str(each.get("profiling_name", "")).startswith("gloo:")
        and each.get("op_id") != each.get("collective_seq_id")
    }
    entries = _telling(dump.entries)
    talking = {str((each.get("process_group") or "?")[0]) for each in entries if each.get("is_p2p")}
    config = {
        name: {"ranks": list(ranks_in(ranges))}
        for name, ranges in members.items()
        if name in talking  # whose peers are named by their places
    }
    return _Dump(
        version=dump.version,
        pg_status={k: v for k, v in dump.pg_status.items() if k not in mixed},
        pg_config={**config, **{k: v for k, v in dump.pg_config.items() if k and v.get("ranks")}},
        entries=entries,
    )


def _telling(entries: list[_Entry]) -> list[_Entry]:
    """Those that are not done, and of each group the newest that is."""
    done: dict[str, _Entry] = {}
    open_ones = []
    for each in entries:
        if each.get("retired") or each.get("state") == "completed":
            if not each.get("is_p2p"):
                done[str(each.get("pg_id"))] = each
        else:
            open_ones.append(each)
    return [*done.values(), *open_ones]


def summarised(stands: Iterable[Stands]) -> tuple[Stood, ...]:
    """Ranks that stand alike as one."""
    ranks: dict[Stood, list[Rank]] = {}
    for each in stands:
        for standing in each.standings:
            ranks.setdefault(_stood(standing, each.members), []).append(each.rank)
    return tuple(replace(stood, ranks=ranges_of(found)) for stood, found in ranks.items())


def _few(ranges: Ranges) -> Ranges:
    return ranges if len(ranges) <= RANGES_MAX else ()


def _stood(standing: Standing, members: dict[str, Ranges]) -> Stood:
    completed = -1 if standing.completed is None else standing.completed
    calls = sorted((seq, call) for seq, call in standing.calls.items() if seq > completed)
    return Stood(
        group=standing.group,
        members=members.get(standing.group) or _few(ranges_of(standing.members)),
        enqueued=standing.enqueued,
        completed=standing.completed,
        calls=tuple(calls[:CALLS_MAX]),
    )
