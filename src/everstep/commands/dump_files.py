"""The files that people name: directories with all that is in them, packed ones, standard input.

Used by diagnose.py and stacks.py, which read them whole or in pieces.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, cast

from everstep.model import UserError

STDIN = "-"
UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""What reading a file may raise, packed or not."""
PACKED: dict[str, Callable[..., object]] = {
    ".gz": lambda filename: gzip.GzipFile(fileobj=filename),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}
_NO_OUTPUT = frozenset(
    {".py", ".sh", ".toml", ".yaml", ".yml", ".md", ".ipynb"}
    | {".pt", ".pth", ".ckpt", ".distcp", ".safetensors", ".npy", ".so"}
)
"""Files of a directory that no job printed: they are read only if they are named."""


def files_of(paths: Sequence[str]) -> Iterator[str]:
    """Every file that is meant, directories with all that is in them. Raises UserError."""
    for path in paths:
        if path == STDIN:
            yield path
        elif Path(path).is_dir():
            yield from sorted(str(each) for each in Path(path).rglob("*") if _may_tell(each))
        elif Path(path).exists():
            yield path
        else:
            raise UserError(f"There is no {path}.")


def _may_tell(file: Path) -> bool:
    return file.is_file() and file.suffix not in _NO_OUTPUT


class Opened(AbstractContextManager[tuple[IO[bytes], IO[bytes] | None]]):
    """A file, unpacked as it is read, and the packed file beneath it."""

    def __init__(self, file: str) -> None:
        self._packed = None if file == STDIN else Path(file).open("rb")  # noqa: SIM115
        unpack = PACKED.get(Path(file).suffix)
        if self._packed is None:
            self._source: IO[bytes] = sys.stdin.buffer
        elif unpack is None:
            self._source = self._packed
        else:
            self._source = cast("IO[bytes]", unpack(filename=self._packed))

    def __enter__(self) -> tuple[IO[bytes], IO[bytes] | None]:
        return self._source, self._packed

    def __exit__(self, *_: object) -> None:
        if self._packed is not None:
            self._source.close()
            self._packed.close()


def why_unread(file: str, error: BaseException) -> str:
    """As a clause."""
    return f"{file}: {getattr(error, 'strerror', None) or error}"
