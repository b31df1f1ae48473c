"""Who may write the journal: the controller of the highest term, and terms only grow.

Every start of a controller takes the next term by the exclusive create of a file `term-N` beside
the journal, which also works on a shared file system. A writer looks for a higher term before each
append and stops when it sees one.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from everstep.journal.records import JournalUnwritable
from everstep.model import Term

KEPT = 8
"""Older files are removed: a controller that restarts in a loop must not fill the directory."""
_NAME = re.compile(r"term-(\d+)")


def newest_term(directory: Path) -> Term:
    """The highest term that was taken, 0 if none or if there is no such directory."""
    try:
        return Term(max(map(_number, directory.iterdir()), default=0))
    except FileNotFoundError:
        return Term(0)


def take_term(directory: Path, owner: str = "") -> Term:
    """Take the next term; from here on the writers of all lower ones are fenced.

    `owner` is for people, say "pid 4711 on host a". Raises JournalUnwritable.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        while not _create(directory, term := Term(newest_term(directory) + 1), owner):
            pass
    except OSError as problem:
        raise unwritable(directory, problem) from problem
    for path in directory.iterdir():
        if 0 < _number(path) <= term - KEPT:
            path.unlink(missing_ok=True)
    return term


def owner_of(directory: Path, term: Term) -> str:
    """What the taker of this term said about itself; empty if unknown."""
    try:
        return _path(directory, term).read_text(errors="replace").strip()
    except OSError:
        return ""


def unwritable(path: Path, problem: OSError) -> JournalUnwritable:
    """The one sentence for a path of the journal that cannot be written."""
    return JournalUnwritable(
        f"The journal cannot be written at {path}: {problem.strerror}. Free space there, or give "
        "everstep a state directory that it may write to; what was committed is safe."
    )


def _create(directory: Path, term: Term, owner: str) -> bool:
    """False: somebody else took this term just now."""
    try:
        fd = os.open(_path(directory, term), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    try:
        with suppress(OSError):  # a full disk has no room for what is only for people
            os.write(fd, f"{owner}\n".encode())
            os.fsync(fd)
    finally:
        os.close(fd)
    sync_directory(directory)
    return True


def sync_directory(directory: Path) -> None:
    """Make names that were created or renamed in it survive a power failure."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_synced(path: Path, content: bytes) -> None:
    """A file of its owner alone, on disk when this returns. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(fd)


def _path(directory: Path, term: Term) -> Path:
    return directory / f"term-{term}"


def _number(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else 0
