"""The code versions that one host has: immutable directories, made beside and renamed into place.

    ROOT/VERSION/manifest.json   what is in it; its digest is VERSION
    ROOT/VERSION/root-0/ ...     the source roots, files read-only
    ROOT/.new-*  ROOT/.gone-*    being written; being removed
    ROOT/.lock                   shared by those who write, exclusive for who removes

The controller has one store, every machine another. What comes in is compared with its manifest,
and that with the id, before it gets its name. Nothing is fsynced: what a power failure tore is
found by `verify` and fetched again. Directories stay writable, so that Python can keep compiled
files there; they stay good, as every file has one and the same time of change.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

from everstep.code.archive import Source, archive_bytes, content_of, head, read_manifest
from everstep.code.manifest import (
    CodeBroken,
    Entry,
    Manifest,
    decoded,
    encoded,
    is_version,
    problem_of,
    short,
    shown,
    version_of,
)
from everstep.code.reading import CHUNK_BYTES, Opener, open_regular, pieces
from everstep.code.snapshot import LIMITS, CodeTooLarge, Limits, Snapshot, Tally, difference
from everstep.model import VersionId

MANIFEST = "manifest.json"
CHANGED_AT_S = 1_000_000_000
"""Time of change of every file, in every store."""
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = ".new-"
_GONE = ".gone-"
_LOCK = ".lock"


class CodeStore:
    """The versions below one directory, which is made when the first one comes.

    Methods raise CodeBroken for content that is not what it should be, also for a version that is
    not there, and OSError. All block on files: an event loop calls them in a thread. Several
    processes and threads may use one store.
    """

    def __init__(self, root: Path, limits: Limits = LIMITS) -> None:
        self.root = root
        self._limits = limits
        """Of what comes in, other than its time."""

    # --- what is there ---------------------------------------------------------------------------

    def has(self, version: VersionId) -> bool:
        """Whether it is there. `verify` says whether it is still whole."""
        return is_version(version) and (self.root / version / MANIFEST).is_file()

    def versions(self) -> tuple[VersionId, ...]:
        """Those that are there, sorted."""
        try:
            names = sorted(path.name for path in self.root.iterdir())
        except FileNotFoundError:
            return ()
        return tuple(VersionId(name) for name in names if self.has(VersionId(name)))

    def manifest(self, version: VersionId) -> Manifest:
        """What is in it."""
        if not self.has(version):
            raise CodeBroken(f"There is no code version {short(version)} in {self.root}.")
        return decoded((self.root / version / MANIFEST).read_bytes(), version)

    def roots(self, version: VersionId) -> list[Path]:
        """Where its source roots lie, in order."""
        count = len(self.manifest(version).roots)
        return [_root_dir(self.root / version, number) for number in range(count)]

    def snapshot(self, version: VersionId) -> Snapshot:
        """The version as a snapshot, to be joined with others or added elsewhere."""
        manifest = self.manifest(version)
        places: list[dict[str, Opener]] = []
        for number, entries in enumerate(manifest.roots):
            root = _root_dir(self.root / version, number)
            places.append(
                {
                    entry.path: partial(open_regular, root / entry.path)
                    for entry in entries
                    if not entry.target
                }
            )
        return Snapshot(manifest, tuple(places))

    def verify(self, version: VersionId) -> None:
        """Read all of it again; CodeBroken says what is not as it was."""
        problem = difference(self.manifest(version), self.roots(version), within_s=None)
        if problem is not None:
            raise CodeBroken(f"Code version {short(version)} in {self.root} is damaged: {problem}.")

    # --- what comes in ---------------------------------------------------------------------------

    def add(self, snapshot: Snapshot, *, within_s: float | None = None) -> VersionId:
        """Copy what a snapshot found; the id is that of what was copied, should files have changed.

        CodeTooLarge if it takes longer than `within_s`, OSError if a file vanished.
        """
        _check_sound(snapshot.manifest)
        if self.has(version := version_of(snapshot.manifest)):
            return version
        deadline = None if within_s is None else time.monotonic() + within_s
        tally = Tally(self._limits)
        with self._beside() as beside:
            copied: list[list[Entry]] = [[] for _ in snapshot.manifest.roots]
            for number, entry in _entries(snapshot.manifest):
                if deadline is not None and time.monotonic() > deadline:
                    raise CodeTooLarge(
                        f"The code could not be copied to {self.root} within {within_s:g} s."
                    )
                root = _root_dir(beside, number)
                copy = _copy(root, entry, snapshot.places[number], self._limits.file_bytes)
                tally.add_size(root, entry.path, copy.size)
                copied[number].append(copy)
            return self._put(beside, Manifest(roots=tuple(map(tuple, copied))))

    def add_manifest(self, manifest: Manifest, from_versions: Sequence[VersionId]) -> VersionId:
        """Make a version of files that these versions have: that is how merged ones come to be.

        CodeTooLarge if that is more than a version may have.
        """
        _check_sound(manifest)
        if excess := _excess(manifest, self._limits):
            raise CodeTooLarge(f"The merged code is too large for a version: {excess}.")
        contents = self._contents(from_versions)
        places: list[dict[str, Opener]] = [{} for _ in manifest.roots]
        for number, entry in _entries(manifest):
            if entry.target:
                continue
            if entry.digest not in contents:
                raise CodeBroken(
                    f"None of the versions to merge has the content of {shown(number, entry.path)}."
                )
            places[number][entry.path] = contents[entry.digest]
        version = self.add(Snapshot(manifest, tuple(places)))
        if version != version_of(manifest):
            self.discard(version)
            raise CodeBroken(
                f"A code version in {self.root} that a merge takes files from is damaged: see "
                f"{', '.join(map(short, from_versions))}."
            )
        return version

    def _contents(self, versions: Sequence[VersionId]) -> dict[str, Opener]:
        """By digest, everything that these versions have."""
        found: dict[str, Opener] = {}
        for version in versions:
            there = self.snapshot(version)
            for number, entry in _entries(there.manifest):
                if entry.digest:
                    found[entry.digest] = there.places[number][entry.path]
        return found

    def receive(self, version: VersionId, source: Source) -> None:
        """Read an archive and put the version in place; nothing is read if it is there already.

        CodeBroken if it is not that version: cut short, damaged, too large.
        """
        if not is_version(version):
            raise CodeBroken(f"{version[:80]!r} is no id of a code version.")
        if self.has(version):
            return
        manifest = read_manifest(source, version)
        if excess := _excess(manifest, self._limits):
            raise CodeBroken(f"Code version {short(version)} is too large: {excess}.")
        with self._beside() as beside:
            for number, entry in _entries(manifest):
                chunks = content_of(source, entry, version)
                if _written(_root_dir(beside, number), entry, chunks) != entry:
                    raise CodeBroken(
                        f"{shown(number, entry.path)} of code version {short(version)} was damaged "
                        "on its way."
                    )
            self._put(beside, manifest)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[Path]:
        """A fresh directory for a version that is being written, removed if it gets no name."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked(fcntl.LOCK_SH):
            beside = Path(tempfile.mkdtemp(prefix=_NEW, dir=self.root))
            try:
                yield beside
            finally:
                shutil.rmtree(beside, ignore_errors=True)

    def _put(self, beside: Path, manifest: Manifest) -> VersionId:
        """Give it its name, unless somebody else was faster with the same."""
        for number in range(len(manifest.roots)):
            _root_dir(beside, number).mkdir(exist_ok=True)
        version = version_of(manifest)
        (beside / MANIFEST).write_bytes(encoded(manifest))
        try:
            beside.rename(self.root / version)
        except OSError:
            if not self.has(version):  # what lies there is torn
                self.discard(version)
                beside.rename(self.root / version)
        return version

    # --- what goes out ---------------------------------------------------------------------------

    def size_of_archive(self, version: VersionId) -> int:
        """Bytes that `send` writes."""
        return archive_bytes(self.manifest(version))

    def chunks(self, version: VersionId) -> Iterator[bytes]:
        """The archive, piece by piece (1 MiB at most, but for the first)."""
        there = self.snapshot(version)
        yield head(there.manifest)
        for number, entry in _entries(there.manifest):
            if entry.target:
                continue
            left = entry.size
            with there.places[number][entry.path]() as file:
                while left and (chunk := file.read(min(left, CHUNK_BYTES))):
                    left -= len(chunk)
                    yield chunk
            if left:
                raise CodeBroken(
                    f"{shown(number, entry.path)} of code version {short(version)} in {self.root} "
                    "was cut short."
                )

    def send(self, version: VersionId, sink: BinaryIO) -> None:
        """Write the archive."""
        sink.writelines(self.chunks(version))

    # --- what goes -------------------------------------------------------------------------------

    def keep(self, wanted: Collection[VersionId]) -> None:
        """Remove all other versions and leftovers; nothing while something is being written."""
        if not self.root.is_dir():
            return
        with contextlib.suppress(BlockingIOError), self._locked(fcntl.LOCK_EX | fcntl.LOCK_NB):
            for version in self.versions():
                if version not in wanted:
                    self._remove(version)
            for path in self.root.iterdir():
                if path.name.startswith((_NEW, _GONE)):
                    shutil.rmtree(path, ignore_errors=True)

    def discard(self, version: VersionId) -> None:
        """Remove one that is broken, so that it can be fetched again."""
        if is_version(version) and (self.root / version).is_dir():
            self._remove(version)

    def _remove(self, version: VersionId) -> None:
        """Under another name first: what is half removed is no version."""
        gone = Path(tempfile.mkdtemp(prefix=_GONE, dir=self.root))
        with contextlib.suppress(FileNotFoundError):  # somebody else was faster
            (self.root / version).rename(gone / version)
        shutil.rmtree(gone, ignore_errors=True)

    @contextlib.contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        descriptor = os.open(self.root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, how)
            yield
        finally:
            os.close(descriptor)


# --- files ---------------------------------------------------------------------------------------


def _root_dir(directory: Path, number: int) -> Path:
    return directory / f"root-{number}"


def _entries(manifest: Manifest) -> Iterator[tuple[int, Entry]]:
    for number, entries in enumerate(manifest.roots):
        for entry in entries:
            yield number, entry


def _check_sound(manifest: Manifest) -> None:
    problem = problem_of(manifest)
    if problem is not None:
        raise CodeBroken(f"No code version can be made: {problem}.")


def _excess(manifest: Manifest, limits: Limits) -> str | None:
    """What there is too much of, as a clause."""
    if manifest.files > limits.files:
        return f"it has {manifest.files} files, {limits.files} at most"
    if manifest.size_bytes > limits.total_bytes:
        return f"it has {manifest.size_bytes} bytes, {limits.total_bytes} at most"
    for number, entry in _entries(manifest):
        if entry.size > limits.file_bytes:
            path = shown(number, entry.path)
            return f"{path} has {entry.size} bytes, {limits.file_bytes} at most"
    return None


def _copy(root: Path, entry: Entry, places: Mapping[str, Opener], at_most: int) -> Entry:
    """Make this entry below a new root of ours; the result says what was read."""
    if entry.target:
        return _written(root, entry, ())
    with places[entry.path]() as file:
        return _written(root, entry, pieces(file, at_most))


def _written(root: Path, entry: Entry, chunks: Iterable[bytes]) -> Entry:
    """Write one file or link. Nothing can lead out of the root: `problem_of` was asked before."""
    where = root / entry.path
    where.parent.mkdir(parents=True, exist_ok=True)
    if entry.target:
        where.symlink_to(entry.target)
        return entry
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(where, _NEW_FILE, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
            file.write(chunk)
        file.flush()
        os.fchmod(descriptor, 0o555 if entry.executable else 0o444)
        os.utime(descriptor, (CHANGED_AT_S, CHANGED_AT_S))
    return Entry(path=entry.path, digest=digest.hexdigest(), size=size, executable=entry.executable)
