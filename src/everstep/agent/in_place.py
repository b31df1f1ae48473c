"""Whether the job's first code version still lies in its source roots, asked at every start.

Used by code.py. To read all of it again would cost every restart tens of milliseconds; so what the
files looked like when they were last read is kept, and only if one looks different they are read.
"""

from __future__ import annotations

import importlib.machinery
import os
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from everstep.code.ignore import left_out
from everstep.code.manifest import Manifest, parents
from everstep.code.snapshot import lies_there
from everstep.model import Seconds

_CODE = tuple(set(importlib.machinery.all_suffixes()) - {".pyc"})


class _Look(NamedTuple):
    """One file or directory, as the file system tells of it without opening it."""

    mode: int
    size: int
    mtime_ns: int
    inode: int


_Looks = dict[str, _Look | None]
"""By path; None: it is not there."""


class InPlace:
    """The source roots of one job on this machine. It blocks; any thread may ask."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = [Path(root) for root in roots]
        self._files: _Looks = {}
        """All files of the version, when they were last read and found right; empty: never."""
        self._directories: _Looks = {}
        self._code_names: dict[str, frozenset[str]] = {}
        """In each directory, what Python might import from it."""
        self._asked = threading.Lock()

    def holds(self, manifest: Manifest, within_s: Seconds) -> bool:
        """Whether a program run from there runs this version. False if that takes too long."""
        deadline = time.monotonic() + within_s
        if not self._asked.acquire(timeout=within_s):
            return False
        try:
            return self._looks_the_same(deadline) or self._read(manifest, deadline)
        except OSError:  # TimeoutError is one
            self._files = {}
            return False
        finally:
            self._asked.release()

    def _looks_the_same(self, deadline: Seconds) -> bool:
        if not self._files or _looks(self._files, deadline) != self._files:
            return False
        for path, now in _looks(self._directories, deadline).items():
            if now == self._directories[path]:
                continue
            # Something came or went: what programs write where they run, or more code.
            if now is None or _code_names(path) != self._code_names[path]:
                return False
            self._directories[path] = now
        return True

    def _read(self, manifest: Manifest, deadline: Seconds) -> bool:
        """Looked at before it is read: what changes meanwhile looks different the next time."""
        self._files = {}
        files: list[str] = []
        directories = {str(root): None for root in self._roots}
        for root, entries in zip(self._roots, manifest.roots, strict=False):
            for entry in entries:
                files.append(f"{root}/{entry.path}")
                directories.update((f"{root}/{each}", None) for each in parents(entry.path))
        looks = _looks(files, deadline)
        self._directories = _looks(directories, deadline)
        self._code_names = {path: _code_names(path) for path in directories}
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not lies_there(manifest, self._roots, left_s):
            return False
        self._files = looks
        return True


def _looks(paths: Iterable[str], deadline: Seconds) -> _Looks:
    """TimeoutError if the file system is too slow."""
    found: _Looks = {}
    for path in paths:
        if time.monotonic() > deadline:
            raise TimeoutError(f"looking at {path} took too long")
        try:
            stat = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            found[path] = None
        else:
            found[path] = _Look(stat.st_mode, stat.st_size, stat.st_mtime_ns, stat.st_ino)
    return found


def _code_names(directory: str) -> frozenset[str]:
    """Modules, and directories: they may be packages."""
    try:
        with os.scandir(directory) as entries:
            return frozenset(
                entry.name
                for entry in entries
                if not left_out(entry.name) and (entry.name.endswith(_CODE) or entry.is_dir())
            )
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()
