"""Takes the content of source roots as it is now, and says whether it is still that of a version.

The command line takes snapshots, store.py copies them, agents compare. Nothing here follows a
symbolic link, opens anything but a regular file, or reads more than the limits allow: a root may be
a home directory with everything in it. A file that cannot be read, or that .everstepignore names,
becomes a link to where it lies.
"""

from __future__ import annotations

import importlib.machinery
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from everstep.code.ignore import (
    IGNORE_FILE,
    VENV_MARK,
    Pattern,
    ignored,
    left_out,
    patterns_in,
)
from everstep.code.manifest import Entry, Manifest, parents, shown, stays_inside
from everstep.code.reading import Opener, digest_of, open_regular
from everstep.model import UserError, Value

MIB = 1 << 20
_GIB = 1 << 30
_CODE_SUFFIXES = tuple(set(importlib.machinery.all_suffixes()) - {".pyc"})
_PACKAGE = "__init__.py"


class CodeTooLarge(UserError):
    """There is too much in a source root, or reading it takes too long."""


class Limits(Value, frozen=True, kw_only=True):
    """What is still source code. More is data, an environment, or somebody's home directory."""

    files: int = 20_000
    total_bytes: int = 256 * MIB
    """Of all roots: what every machine gets when the code is changed."""
    file_bytes: int = 64 * MIB
    within_s: float = 3.0
    """Time for looking through all roots: a submission is not to wait for a slow file system."""


LIMITS = Limits()


class Snapshot(NamedTuple):
    """What was found: the list, where the content of each file is, and what people are told."""

    manifest: Manifest
    places: tuple[Mapping[str, Opener], ...]
    """For each root: path of a file -> its content. Not of links."""
    remarks: tuple[str, ...] = ()
    """Sentences on what is not in it as one might expect."""
    commit: str = ""
    """Of git, if it was taken from there."""


def joined(snapshots: Sequence[Snapshot]) -> Snapshot:
    """The roots of all of these, in order, as one."""
    return Snapshot(
        Manifest(roots=tuple(root for snapshot in snapshots for root in snapshot.manifest.roots)),
        tuple(place for snapshot in snapshots for place in snapshot.places),
        tuple(remark for snapshot in snapshots for remark in snapshot.remarks),
        next((snapshot.commit for snapshot in snapshots if snapshot.commit), ""),
    )


def take(
    roots: Sequence[Path],
    limits: Limits = LIMITS,
    *,
    without: Sequence[Path] = (),
    linked: Sequence[Path] = (),
) -> Snapshot:
    """The content of these directories.

    `without`: directories that are not part of it, wherever they lie; `linked`: those that are only
    linked. Raises CodeTooLarge, UserError for what the user can mend, and OSError, also if a file
    vanishes meanwhile: then it may go well a second time.
    """
    scan = _Scan(limits, without, linked)
    found = [scan.look_through(Path(os.path.abspath(root))) for root in roots]
    kept = [scan.read(one) for one in found]  # all sizes are known before any content is read
    manifest = Manifest(roots=tuple(entries for entries, _ in kept))
    return Snapshot(manifest, tuple(places for _, places in kept), tuple(scan.remarks()))


class Tally:
    """What was found so far, against the limits: of all roots together. git.py counts with it too.

    Methods raise CodeTooLarge.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._deadline = time.monotonic() + limits.within_s
        self._files = 0
        self._bytes = 0

    def one_more(self, root: Path) -> None:
        """A file, or a link."""
        self._files += 1
        if self._files > self._limits.files:
            raise CodeTooLarge(
                f"{root} has more than {self._limits.files} files{_advice(root)}, or have the code "
                "in a directory of its own."
            )

    def add_size(self, root: Path, path: str, size: int) -> None:
        """Of one file."""
        if size > self._limits.file_bytes:
            raise CodeTooLarge(
                f"{root / path} has {_size(size)}, and files of a code version at most "
                f"{_size(self._limits.file_bytes)}{_advice(root)}."
            )
        self._bytes += size
        if self._bytes > self._limits.total_bytes:
            raise CodeTooLarge(
                f"{root} has more than {_size(self._limits.total_bytes)} in it{_advice(root)}, or "
                "have the code in a directory of its own."
            )

    def in_time(self, root: Path) -> None:
        if time.monotonic() > self._deadline:
            raise CodeTooLarge(
                f"{root} could not be read within {self._limits.within_s:g} s{_advice(root)}, or "
                "have the code in a directory of its own."
            )


def _advice(root: Path) -> str:
    return f": name what is no code in {root / IGNORE_FILE} (it is linked then, not copied)"


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / MIB:.3g} MiB"


def some(names: Sequence[str]) -> str:
    """The first three, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


class _File(NamedTuple):
    path: str
    executable: bool


class _Found(NamedTuple):
    """One root, looked through but not read."""

    root: Path
    links: dict[str, str]
    """Path -> target."""
    files: list[_File]


class _Scan:
    """One look through all roots."""

    def __init__(self, limits: Limits, without: Sequence[Path], linked: Sequence[Path]) -> None:
        self._tally = Tally(limits)
        self._file_bytes = limits.file_bytes
        self._without = {os.path.realpath(path) for path in without}
        self._linked = {os.path.realpath(path) for path in linked}
        self._special: list[str] = []
        self._unreadable: list[str] = []

    def remarks(self) -> Iterator[str]:
        if self._special:
            yield f"Left out, as no file, directory or link: {some(self._special)}."
        if self._unreadable:
            yield f"Linked and not versioned, as it cannot be read: {some(self._unreadable)}."

    def look_through(self, root: Path) -> _Found:
        """Everything below the root, by kind and size."""
        if not root.is_dir():
            missing = "is not a directory" if root.exists() else "does not exist"
            raise UserError(f"{root} {missing}: give the directory that the code lies in.")
        patterns = patterns_of(root)
        real = os.path.realpath(root)
        found = _Found(root, {}, [])
        waiting = [""]
        while waiting:
            below = waiting.pop()
            self._tally.in_time(root)
            for item in self._items(found, below):
                path = utf8(f"{below}{item.name}", root)
                is_directory = item.is_dir(follow_symlinks=False)
                if is_directory and f"{real}/{path}" in self._without:
                    continue
                if item.is_symlink():
                    said = str(Path(item.path).readlink())
                    self._add_link(found, path, link_target(root, path, said))
                elif f"{real}/{path}" in self._linked or ignored(
                    patterns, path, directory=is_directory
                ):
                    self._add_link(found, path, f"{root}/{path}")
                elif is_directory:
                    waiting.append(f"{path}/")
                else:
                    self._add_file(found, path, item)
        settle(found.links, [file.path for file in found.files], root)
        return found

    def _items(self, found: _Found, below: str) -> list[os.DirEntry[str]]:
        """What is in one directory, if it is to be looked at."""
        try:
            with os.scandir(found.root / below) as scanned:
                items = [item for item in scanned if not left_out(item.name)]
        except PermissionError:
            if not below:
                raise
            path = below.rstrip("/")
            self._unreadable.append(str(found.root / path))
            self._add_link(found, path, f"{found.root}/{path}")
            return []
        return [] if below and any(item.name == VENV_MARK for item in items) else items

    def _add_link(self, found: _Found, path: str, target: str) -> None:
        found.links[path] = utf8(target, found.root)
        self._tally.one_more(found.root)

    def _add_file(self, found: _Found, path: str, item: os.DirEntry[str]) -> None:
        status = item.stat(follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            self._special.append(item.path)
            return
        self._tally.add_size(found.root, path, status.st_size)
        self._tally.one_more(found.root)
        found.files.append(_File(path, executable=bool(status.st_mode & stat.S_IXUSR)))

    def read(self, found: _Found) -> tuple[tuple[Entry, ...], dict[str, Opener]]:
        """The entries of one root, and where the content of its files is."""
        entries = {path: Entry(path=path, target=to) for path, to in found.links.items()}
        places: dict[str, Opener] = {}
        for file in found.files:
            self._tally.in_time(found.root)
            where = found.root / file.path
            opener = partial(open_regular, where)
            try:
                digest, size = digest_of(opener, self._file_bytes)
            except PermissionError:
                self._unreadable.append(str(where))
                entries[file.path] = Entry(path=file.path, target=str(where))
                continue
            if size > self._file_bytes:
                self._tally.add_size(found.root, file.path, size)  # it grows
            places[file.path] = opener
            entries[file.path] = Entry(
                path=file.path, digest=digest, size=size, executable=file.executable
            )
        return tuple(entries[path] for path in sorted(entries)), places


def patterns_of(root: Path) -> tuple[Pattern, ...]:
    """What its .everstepignore says; UserError if that cannot be read."""
    where = root / IGNORE_FILE
    try:
        return patterns_in(where.read_text(encoding="utf-8"), str(where))
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeError) as error:
        raise UserError(f"{where} cannot be read: {error}; mend it, or remove it.") from error


def utf8(name: str, root: Path) -> str:
    """The same name; UserError if it is none that every machine can write."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"The name {os.fsencode(name)!r} in {root} is not UTF-8: rename it."
        ) from None
    return name


# --- links ---------------------------------------------------------------------------------------


def link_target(root: Path, path: str, said: str) -> str:
    """Where a link at root/path that says this leads: relative within the root, else absolute.

    Relative also if it says its target in full: else a version would run what is edited in place.
    """
    said = str(PurePosixPath(said))
    where = root / path
    real = os.path.realpath(root).rstrip("/")
    way = _way_within(root, path, said)
    if way and f"{os.path.realpath(where)}/".startswith(f"{real}/"):
        return way
    return str(where.parent / said)


def _way_within(root: Path, path: str, said: str) -> str:
    """The relative way from root/path to its target, by their words; empty if that is outside."""
    if said.startswith("/"):
        said = os.path.normpath(said)
        for above in (str(root), os.path.realpath(root)):
            if f"{said}/".startswith(f"{above.rstrip('/')}/"):
                inside = os.path.relpath(said, above)
                return os.path.relpath(inside, str(PurePosixPath(path).parent))
        return ""
    return said if stays_inside(path, said) else ""


def settle(links: dict[str, str], files: Sequence[str], root: Path) -> None:
    """Have relative links to what is left out lead to where that lies instead."""
    known = {".", *links, *files}
    known |= {directory for path in known for directory in parents(path)}
    for path, target in links.items():
        if target.startswith("/"):
            continue
        goal = os.path.normpath(PurePosixPath(path).parent / target)
        if goal not in known and links.keys().isdisjoint(parents(goal)):
            links[path] = str((root / path).parent / target)


# --- comparing -----------------------------------------------------------------------------------


def lies_there(manifest: Manifest, roots: Sequence[Path], within_s: float = 5.0) -> bool:
    """Whether a program run from these directories runs the code of this version."""
    return difference(manifest, roots, within_s) is None


def difference(manifest: Manifest, roots: Sequence[Path], within_s: float | None) -> str | None:
    """The first thing found in which these directories differ from the version, as a clause.

    What the version does not have counts only if Python could import it: code beside its code.
    Everything else is what programs write where they run.
    """
    if len(roots) != len(manifest.roots):
        return f"there are {len(roots)} source roots and not {len(manifest.roots)}"
    deadline = None if within_s is None else time.monotonic() + within_s
    for number, (root, entries) in enumerate(zip(roots, manifest.roots, strict=True)):
        for entry in entries:
            if deadline is not None and time.monotonic() > deadline:
                return f"it could not be read within {within_s:g} s"
            problem = _difference_of(root, entry)
            if problem is not None:
                return f"{shown(number, entry.path)} {problem}"
        extra = _code_beside(root, entries)
        if extra is not None:
            return f"{shown(number, extra)} is not in it"
    return None


def _difference_of(root: Path, entry: Entry) -> str | None:
    where = root / entry.path
    try:
        if entry.target:
            return None if _same_link(root, entry) else "leads elsewhere"
        status = os.lstat(where)
        if not stat.S_ISREG(status.st_mode) or status.st_size != entry.size:
            return "has another size"
        if bool(status.st_mode & stat.S_IXUSR) != entry.executable:
            return "has other rights"
        found = digest_of(partial(open_regular, where), entry.size)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return None if found == (entry.digest, entry.size) else "has another content"


def _same_link(root: Path, entry: Entry) -> bool:
    """Also true of what is only linked, if this is where it lies."""
    where = root / entry.path
    if entry.target == str(where):
        return os.path.lexists(where)
    said = str(where.readlink())
    return entry.target in (said, str(where.parent / said), link_target(root, entry.path, said))


def _code_beside(root: Path, entries: Sequence[Entry]) -> str | None:
    """A path that the version does not have and that Python would import from here."""
    known = {entry.path for entry in entries}
    directories = {"", *(parent for path in known for parent in parents(path))}
    for directory in sorted(directories):
        try:
            with os.scandir(root / directory) as items:
                for item in items:
                    path = f"{directory}/{item.name}" if directory else item.name
                    new = path not in known and path not in directories
                    if new and not left_out(item.name) and _importable(item):
                        return path
        except OSError:
            return directory or "."
    return None


def _importable(item: os.DirEntry[str]) -> bool:
    if item.name.endswith(_CODE_SUFFIXES):
        return True
    return item.is_dir() and Path(item.path, _PACKAGE).exists()
