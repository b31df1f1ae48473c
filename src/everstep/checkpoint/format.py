"""The format of a shard: one rank's state of one step, the same bytes in memory and on disk.

    page 0 (4096 bytes)      magic word, header with its checksum, perhaps the payload's checksum
    payload                  index length, index (tensor table and pickled skeletons), tensor bytes

The magic word is stored last and as one machine word, so a shard is whole or it is nothing: that is
the commit. Two things tell whether a payload is what it was. Its digest (digest.py) is in every
header: the rank makes it as it saves, it goes with the shard wherever that goes, and the rank that
restores it compares. Its checksum, a CRC-32, is added where a shard came over a connection or lies
on disk, by agents, who have no torch. slots.py writes shards to memory, disk.py to files,
capture.py makes payloads and load.py reads them. This module needs no torch: agents check shards of
states that they could not load, and never unpickle anything.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from enum import StrEnum
from typing import NamedTuple

import msgspec

from everstep.model import EverstepError, Generation, Rank, Step, Value

PAGE = 4096
ALIGN = 64
"""Tensors start at multiples of this: a cache line, and enough for every element type."""
CHUNK_BYTES = 16 << 20
"""Piece in which checksums are computed and files are written."""
MAGIC = int.from_bytes(b"EVSHARD2", "little")
VOID = 0
NO_REPLICAS = -1

_MAGIC_AT = 0
_CHECK_AT = 8
_HEADER_AT = 16
_HEADER = struct.Struct("<qqiiQQQQ")
_CHECK = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")
_CHECKED = 1 << 32
"""Marks that a checksum is there."""


class ShardBad(EverstepError):
    """A shard is not what it should be: torn, truncated, flipped, or another job's or step's."""


class Header(Value, frozen=True, kw_only=True, array_like=True):
    """What a shard says about itself."""

    step: Step
    generation: Generation
    """The one that computed the step."""
    rank: Rank
    world_size: int
    sequence: int
    """Grows with every save of this rank: two reads that saw the same number saw the same shard."""
    payload_bytes: int
    digest: int
    """Of the payload that the rank saved: digest.py. A part on disk has that of its whole."""


class MeshEntry(Value, frozen=True, kw_only=True, array_like=True):
    """A DeviceMesh: which ranks hold the parts of its distributed tensors."""

    device: str
    """Device type, "cpu" or "cuda"."""
    names: tuple[str, ...]
    """Of its dimensions; empty if they have none."""
    shape: tuple[int, ...]
    ranks: tuple[Rank, ...]
    """In row-major order."""


class Placed(Value, frozen=True, kw_only=True, array_like=True):
    """What a DTensor knows beside its local shard."""

    mesh: int
    """Number in ShardIndex.meshes."""
    placements: tuple[str, ...]
    """One for each dimension of the mesh, as layout.py spells them: "R", "S(0)"."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    stride: tuple[int, ...]
    """Of the whole tensor."""
    at: tuple[int, ...]
    """Where in the whole tensor the local shard begins, in elements of each dimension."""


class TensorEntry(Value, frozen=True, kw_only=True, array_like=True):
    """Where one tensor's elements are, and how they are laid out."""

    dtype: str
    """torch's name without "torch."."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements. Dense: exactly numel elements are stored, in the order of the strides."""
    offset: int
    """Bytes from ShardIndex.tensors_at."""
    nbytes: int
    device: str
    """Device type the tensor was on: "cpu" or "cuda"."""
    placed: Placed | None = None
    """For the local shard of a DTensor: the whole that it belongs to."""
    replicas: int = NO_REPLICAS
    """Number in ShardIndex.replicas of the ranks that should hold the same bytes."""


class EntryKind(StrEnum):
    """What an entry of the state was, for whoever makes another format of it."""

    OTHER = "other"
    MODULE = "module"
    DDP = "ddp"
    """A module whose keys begin with "module."."""
    OPTIMIZER = "optimizer"


class StateEntry(Value, frozen=True, kw_only=True, array_like=True):
    """One entry of the dictionary given to Run.checkpoint(), without its tensors."""

    name: str
    skeleton: bytes
    """Pickle in which each tensor is a call of tensor_at(its number in the table)."""
    kind: EntryKind = EntryKind.OTHER
    first: int = 0
    """Number of its first tensor in the table; they follow each other."""
    names: tuple[str, ...] = ()
    """Of an optimizer: its parameters' names in their module, by their number in its state."""


class ShardIndex(Value, frozen=True, kw_only=True, array_like=True):
    """The table of contents at the start of a payload."""

    entries: tuple[StateEntry, ...]
    tensors: tuple[TensorEntry, ...]
    meshes: tuple[MeshEntry, ...] = ()
    replicas: tuple[tuple[Rank, ...], ...] = ()


def tensor_at(number: int) -> object:
    """Stands for a tensor in a skeleton. load.py replaces it; nobody may call it."""
    raise ShardBad(f"tensor {number} of a shard can only be loaded together with its shard")


# --- the header page -----------------------------------------------------------------------------


def store_word(page: memoryview, at: int, value: int) -> None:
    """Store 8 bytes as one machine word: a kill leaves the old value or the new one."""
    page[at : at + 8].cast("Q")[0] = value


def load_word(page: memoryview, at: int) -> int:
    return int(page[at : at + 8].cast("Q")[0])


def erase(page: memoryview) -> None:
    """From here on there is no shard: what begins an overwrite, and what drops a copy."""
    store_word(page, _MAGIC_AT, VOID)


def commit(page: memoryview, header: Header, crc: int | None = None) -> None:
    """From here on there is a shard. The payload must be complete; the page must be erased.

    `crc`: the payload's CRC-32, where it is known.
    """
    body = _HEADER.pack(
        header.step,
        header.generation,
        header.rank,
        header.world_size,
        header.sequence,
        header.payload_bytes,
        header.digest,
        0 if crc is None else _CHECKED | crc,
    )
    page[_HEADER_AT : _HEADER_AT + len(body)] = body
    page[_CHECK_AT : _CHECK_AT + _CHECK.size] = _CHECK.pack(zlib.crc32(body))
    store_word(page, _MAGIC_AT, MAGIC)


class Read(NamedTuple):
    """What the page of a whole shard says."""

    header: Header
    crc: int | None
    """The payload's CRC-32, where the shard came over a connection or lies on disk."""


def read_header(page: memoryview) -> Header | None:
    """The header of a whole shard; None for a torn, an erased or a foreign one."""
    found = read_page(page)
    return None if found is None else found.header


def read_page(page: memoryview) -> Read | None:
    """The same with the payload's checksum."""
    if len(page) < PAGE or load_word(page, _MAGIC_AT) != MAGIC:
        return None
    body = bytes(page[_HEADER_AT : _HEADER_AT + _HEADER.size])
    if _CHECK.unpack_from(page, _CHECK_AT)[0] != zlib.crc32(body):
        return None
    step, generation, rank, world_size, sequence, payload_bytes, digest, crc = _HEADER.unpack(body)
    header = Header(
        step=step,
        generation=generation,
        rank=rank,
        world_size=world_size,
        sequence=sequence,
        payload_bytes=payload_bytes,
        digest=digest,
    )
    return Read(header, crc ^ _CHECKED if crc & _CHECKED else None)


def header_page(header: Header, crc: int) -> bytes:
    """The first page of a shard on disk."""
    page = memoryview(bytearray(PAGE))
    commit(page, header, crc)
    return bytes(page)


# --- the payload ---------------------------------------------------------------------------------


def padded(size: int, to: int = ALIGN) -> int:
    return -(-size // to) * to


def pack_index(index: ShardIndex) -> bytes:
    """The start of a payload, padded to whole pages; the tensors follow it."""
    body = msgspec.msgpack.encode(index)
    raw = _LENGTH.pack(len(body)) + body
    return raw.ljust(padded(len(raw), PAGE), b"\0")


def unpack_index(payload: memoryview, size: int | None = None) -> tuple[ShardIndex, int]:
    """The index and the place in the payload where the tensors start. Raises ShardBad.

    `size` is the whole payload's if this is only its beginning.
    """
    whole = len(payload) if size is None else size
    try:
        (length,) = _LENGTH.unpack_from(payload, 0)
        body = payload[_LENGTH.size : _LENGTH.size + length]
        index = msgspec.msgpack.decode(body, type=ShardIndex)
    except (struct.error, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ShardBad(f"the index of the shard cannot be read: {error}") from error
    tensors_at = padded(_LENGTH.size + length, PAGE)
    for entry in index.tensors:
        if entry.offset < 0 or tensors_at + entry.offset + entry.nbytes > whole:
            raise ShardBad(f"the shard's index points beyond its {whole} bytes")
        if not NO_REPLICAS <= entry.replicas < len(index.replicas):
            raise ShardBad(f"the shard's index names replicas {entry.replicas}, which it lacks")
        if entry.placed is not None and not 0 <= entry.placed.mesh < len(index.meshes):
            raise ShardBad(f"the shard's index names mesh {entry.placed.mesh}, which it lacks")
    return index, tensors_at


def crc_of(payload: memoryview, crc: int = 0) -> int:
    """CRC-32 of the payload, after what `crc` is of. zlib holds no GIL meanwhile."""
    for at in range(0, len(payload), CHUNK_BYTES):
        crc = zlib.crc32(payload[at : at + CHUNK_BYTES], crc)
    return crc


# --- a whole shard -------------------------------------------------------------------------------


class Expected(Value, frozen=True, kw_only=True):
    """What a reader wants to find. None: any."""

    step: Step
    rank: Rank
    generation: Generation | None = None
    world_size: int | None = None


def check_header(header: Header, expected: Expected, where: str) -> None:
    """Raises ShardBad if the shard is another one than expected."""
    wanted = {
        "step": expected.step,
        "rank": expected.rank,
        "generation": expected.generation,
        "world_size": expected.world_size,
    }
    for name, value in wanted.items():
        found = getattr(header, name)
        if value is not None and found != value:
            word = name.replace("_", " ")
            raise ShardBad(f"{where} holds a shard of {word} {found}, not of {word} {value}")


class Shard:
    """A whole shard that was opened for reading. Holds its mapping as long as `payload` lives.

    `crc` is its payload's CRC-32, or None in the slots of the rank that saved it.
    """

    def __init__(self, header: Header, crc: int | None, payload: memoryview, where: str) -> None:
        self.header = header
        self.crc = crc
        self.payload = payload
        self.where = where

    def verify(self) -> None:
        """Raises ShardBad if the payload's checksum is known and differs. For want of torch: a
        rank compares the digest instead, which also tells what was damaged before it was sent.
        """
        if self.crc is None:
            return
        found = crc_of(self.payload)
        if found != self.crc:
            raise ShardBad(
                f"{self.where} is damaged: its checksum is {found:08x}, "
                f"but {self.crc:08x} was written"
            )


def open_shard(mapping: mmap.mmap, expected: Expected, where: str) -> Shard:
    """Check what a mapped slot or file says about itself; verify() then checks its payload."""
    whole = memoryview(mapping)
    found = read_page(whole[:PAGE])
    if found is None:
        raise ShardBad(f"{where} holds no complete shard")
    header = found.header
    check_header(header, expected, where)
    if PAGE + header.payload_bytes > len(whole):
        raise ShardBad(
            f"{where} is truncated: {len(whole)} bytes, "
            f"but its header says {PAGE + header.payload_bytes}"
        )
    return Shard(header, found.crc, whole[PAGE : PAGE + header.payload_bytes], where)
