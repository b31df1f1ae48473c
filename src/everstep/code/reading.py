"""How files of source roots are read: regular ones only, in pieces, with their digest."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

CHUNK_BYTES = 1 << 20
Opener = Callable[[], BinaryIO]
"""Opens one file's content, wherever it lies."""


def open_regular(path: Path) -> BinaryIO:
    """A file's content. OSError if it is no regular file: nothing that would wait for a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "rb", buffering=0)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise OSError(f"{path} is no regular file any more")
    return file


def pieces(file: BinaryIO, at_most: int) -> Iterator[bytes]:
    """The content, but no further than one piece past `at_most`: a file may grow all the time."""
    size = 0
    while size <= at_most and (piece := file.read(CHUNK_BYTES)):
        size += len(piece)
        yield piece


def digest_of(opener: Opener, at_most: int) -> tuple[str, int]:
    """Digest and size of what is read; a piece more than `at_most` at the most."""
    digest, size = hashlib.sha256(), 0
    with opener() as file:
        for piece in pieces(file, at_most):
            digest.update(piece)
            size += len(piece)
    return digest.hexdigest(), size
