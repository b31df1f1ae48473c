"""One record of the journal, and how a file of records is read.

    records := (length: u32, crc32 of payload: u32, payload)*        little endian
    payload := msgpack array of Record's fields

A writer that dies leaves at most one record unfinished, at the end. So what cannot be read is a
torn end if no whole record comes after it, and may be cut off. If one does, the file was damaged
later: then reading stops with the offset of the damage, because dropping the records after it would
forget what was decided and acted on. What looks torn but was whole once (a flipped byte in the very
last record) cannot be told from a torn record; writer.py therefore keeps what it cuts off.

Errors of the journal, all with one sentence for people:

    JournalError
     +- JournalCorrupt      damage in the middle, or records that do not belong there
     +- JournalUnwritable   no space, read-only, no permission; what was committed is safe
     +- Fenced              another controller took a higher term
     +- JournalDivergence   the same version decides differently from what is recorded
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from everstep.actions import ControllerAction
from everstep.events import ControllerEvent
from everstep.model import EverstepError, MachineId, Seconds, Term, Value

HEADER = struct.Struct("<II")
PAYLOAD_BYTES_MAX = 16 << 20
"""A longer length is garbage. 10,000 orders of one decision take about 4 MiB."""
_FIRST_BYTE = re.compile(rb"[\x97-\x9f]")
"""How msgpack begins an array of seven fields or, one day, more: makes searching garbage quick."""


class JournalError(EverstepError):
    """Root of the journal's errors."""


class JournalCorrupt(JournalError):
    """Records in the middle of a file are damaged; `offset` is where."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset


class JournalUnwritable(JournalError):
    """The record was not written, wholly or partly; the same append may be tried again."""


class Fenced(JournalError):
    """Another controller of the job took a higher term: this one must stop at once."""


class JournalDivergence(JournalError):
    """The core does not decide again what it decided before: it is not deterministic."""


class Origin(Value, frozen=True, kw_only=True, array_like=True):
    """Which message of which agent's session an event came in."""

    machine: MachineId
    agent: str
    seq: int


class Record(Value, frozen=True, kw_only=True, array_like=True):
    """One event, and what was decided because of it."""

    seq: int
    """Its journal number, from 1."""
    time: Seconds
    term: Term
    version: str
    """Of the everstep that decided."""
    origin: Origin | None
    """None: not from an agent's session."""
    event: ControllerEvent
    actions: tuple[ControllerAction, ...]


class Entry(msgspec.Struct, frozen=True):
    """A record and where it lies in its file."""

    offset: int
    end: int
    record: Record


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def frame(payload: bytes) -> bytes:
    """The payload with length and checksum in front."""
    return HEADER.pack(len(payload), zlib.crc32(payload)) + payload


def encode(record: Record) -> bytes:
    """The record as it lies in the file. Raises JournalError if it is absurdly large."""
    payload = _encoder.encode(record)
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise JournalError(
            f"Record {record.seq} has {len(payload)} bytes, more than {PAYLOAD_BYTES_MAX}: "
            "this is a defect of everstep."
        )
    return frame(payload)


def unframe(data: bytes | memoryview, at: int) -> bytes | None:
    """The payload that begins at this offset, or None if it is torn or damaged."""
    if at + HEADER.size > len(data):
        return None
    length, checksum = HEADER.unpack_from(data, at)
    start = at + HEADER.size
    if not 0 < length <= PAYLOAD_BYTES_MAX or start + length > len(data):
        return None
    payload = bytes(data[start : start + length])
    return payload if zlib.crc32(payload) == checksum else None


class Reader:
    """Iterates over the entries of a file from one record's border on, and says where they end."""

    def __init__(self, path: Path, *, offset: int = 0, last_seq: int = 0) -> None:
        self.end = offset
        """Where the last whole record ends; after the iteration, where the file should."""
        self.torn = 0
        """After the iteration: bytes behind `end` that are no record."""
        self._path = path
        self._last_seq = last_seq
        self._last_term = Term(0)

    def __iter__(self) -> Iterator[Entry]:
        """Raises JournalCorrupt for damage that is not a torn end, OSError."""
        with self._path.open("rb") as file:
            file.seek(self.end)
            while (payload := self._payload(file)) is not None:
                entry = Entry(self.end, self.end + HEADER.size + len(payload), self._read(payload))
                self.end = entry.end
                yield entry
            size = file.seek(0, os.SEEK_END)
            self.torn = size - self.end
            self._refuse_damage(file)

    def _payload(self, file: BinaryIO) -> bytes | None:
        header = file.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        length, checksum = HEADER.unpack(header)
        if not 0 < length <= PAYLOAD_BYTES_MAX:
            return None
        payload = file.read(length)
        return payload if len(payload) == length and zlib.crc32(payload) == checksum else None

    def _read(self, payload: bytes) -> Record:
        try:
            record = _decoder.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
            raise JournalCorrupt(
                f"The journal {self._path} holds at byte {self.end} a record that this version of "
                f"everstep cannot read ({problem}): use the version that wrote it, or a newer one.",
                self.end,
            ) from None
        if record.seq != self._last_seq + 1 or record.term < self._last_term:
            raise JournalCorrupt(
                f"The journal {self._path} holds at byte {self.end} record {record.seq} of term "
                f"{record.term} after record {self._last_seq} of term {self._last_term}: two "
                "controllers wrote to it at once, or parts were copied together. Restore it from "
                "a copy, or move it away and submit the job again: its checkpoints are not in it.",
                self.end,
            )
        self._last_seq, self._last_term = record.seq, record.term
        return record

    def _refuse_damage(self, file: BinaryIO) -> None:
        if not self.torn:
            return
        file.seek(self.end)
        data = file.read()
        following = _next_whole(data)
        if following is None or unframe(data, 0) is not None:
            return  # torn, or a live writer has finished it since
        raise JournalCorrupt(
            f"The journal {self._path} is damaged at byte {self.end}, in record "
            f"{self._last_seq + 1}; whole records follow from byte {self.end + following} on, so "
            "nothing was cut off. Restore the file from a copy, or move the journal away and "
            "submit the job again: its checkpoints are not in it.",
            self.end,
        )


def read_at(path: Path, offset: int) -> Record:
    """The record that begins at this offset. Raises JournalCorrupt, OSError."""
    with path.open("rb") as file:
        file.seek(offset)
        header = file.read(HEADER.size)
        length = HEADER.unpack(header)[0] if len(header) == HEADER.size else 0
        payload = unframe(header + file.read(min(length, PAYLOAD_BYTES_MAX)), 0)
    if payload is None:
        raise JournalCorrupt(f"The journal {path} is damaged at byte {offset}.", offset)
    return _decoder.decode(payload)


def _next_whole(data: bytes) -> int | None:
    """Offset of the first whole record in data that does not begin with one."""
    view = memoryview(data)
    for match in _FIRST_BYTE.finditer(data, HEADER.size + 1):
        at = match.start() - HEADER.size
        if unframe(view, at) is not None:
            return at
    return None
