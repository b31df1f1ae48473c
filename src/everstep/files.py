"""Small files that are whole or absent: written beside, synced, renamed; read with clear errors.

For setups, endpoints and results, by every process that has some. Not for logs, journals, shards.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import msgspec

from everstep.model import EverstepError

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
_Content = TypeVar("_Content")


class FileUnreadable(EverstepError):
    """A small file of ours is missing, not readable, or not what it should be."""


def write_atomically(path: Path, content: bytes | msgspec.Struct) -> None:
    """Replace the file by `content` (a struct as JSON), private to its owner. OSError if it fails.

    A reader, also one after a power failure, sees the old file or the new one, never a part.
    """
    data = content if isinstance(content, bytes) else msgspec.json.encode(content)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(beside, _NEW_FILE, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read_json(path: Path, of: type[_Content]) -> _Content:
    """The file's content as this type; FileUnreadable says which file and what is wrong with it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=of)
    except OSError as error:
        raise FileUnreadable(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FileUnreadable(f"{path} is not what it should be: {error}") from error
