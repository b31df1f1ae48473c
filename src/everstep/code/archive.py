"""The archive of a code version: how it goes to another store.

    MAGIC                8 bytes
    length               8 bytes, little-endian
    manifest             as it lies in a store; its digest is the version's id
    contents             of every file, in the order of the manifest, nothing between them

What comes in is not trusted: the manifest is compared with the id before anything is written, and
limits how much is read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Protocol

from everstep.code.manifest import CodeBroken, Entry, Manifest, decoded, encoded, short
from everstep.code.reading import CHUNK_BYTES
from everstep.model import VersionId

MAGIC = b"EVCODE1\n"
MANIFEST_BYTES_MAX = 64 << 20
"""A manifest of 20,000 files has about 3 MiB."""
_LENGTH = struct.Struct("<Q")


class Source(Protocol):
    """Where an archive is read from: a file, a socket's file, a response."""

    def read(self, count: int, /) -> bytes: ...


def head(manifest: Manifest) -> bytes:
    """Everything before the contents."""
    data = encoded(manifest)
    return MAGIC + _LENGTH.pack(len(data)) + data


def archive_bytes(manifest: Manifest) -> int:
    """Size of the whole archive."""
    return len(head(manifest)) + manifest.size_bytes


def read_manifest(source: Source, version: VersionId) -> Manifest:
    """The manifest of an archive; CodeBroken if it is not that of this version."""
    if _read(source, len(MAGIC), version) != MAGIC:
        raise CodeBroken(f"What came as code version {short(version)} is no archive of everstep.")
    (length,) = _LENGTH.unpack(_read(source, _LENGTH.size, version))
    if length > MANIFEST_BYTES_MAX:
        raise CodeBroken(f"The manifest of code version {short(version)} has {length} bytes.")
    return decoded(_read(source, length, version), version)


def content_of(source: Source, entry: Entry, version: VersionId) -> Iterator[bytes]:
    """The bytes of the next file; CodeBroken if the archive ends before."""
    left = entry.size
    while left:
        chunk = source.read(min(left, CHUNK_BYTES))
        if not chunk:
            raise CodeBroken(
                f"The archive of code version {short(version)} ended {left} bytes before the end "
                f"of {entry.path}."
            )
        left -= len(chunk)
        yield chunk


def _read(source: Source, count: int, version: VersionId) -> bytes:
    found = bytearray()
    while len(found) < count:
        chunk = source.read(min(count - len(found), CHUNK_BYTES))
        if not chunk:
            raise CodeBroken(f"The archive of code version {short(version)} ended in its head.")
        found += chunk
    return bytes(found)
