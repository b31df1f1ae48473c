"""What is in a code version: its canonical list of files, and the id that follows from it.

Pure. snapshot.py and git.py make manifests, merge.py joins them, store.py keeps what they list.
The id is of content only: where the source roots lay does not count, so the same code has the same
id on every host. Directories are not listed: an empty one is not part of a version.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

from everstep.model import NO_VERSION, EverstepError, Value, VersionId

FORMAT = b"everstep code 1\n"
"""Goes into every id before the manifest: another way to list files gives other ids."""
PATH_BYTES_MAX = 4000
"""Linux opens no longer ones (PATH_MAX, with room for where the version lies)."""
SHORT = 12
_VERSION = re.compile(r"[0-9a-f]{64}")


class CodeBroken(EverstepError):
    """A code version is not what its id says: damaged, cut short, or never made by everstep."""


class Entry(Value, frozen=True, kw_only=True, array_like=True):
    """One file, or one symbolic link, of a source root."""

    path: str
    """Relative to the root, with "/" between its parts."""
    digest: str = ""
    """SHA-256 of its content, in hex; empty for a link."""
    size: int = 0
    executable: bool = False
    target: str = ""
    """Of a link: relative if it leads to something in the same root, else absolute. Empty: a file.
    """


class Manifest(Value, frozen=True, kw_only=True):
    """Everything in one version: for each source root its entries, sorted by path."""

    roots: tuple[tuple[Entry, ...], ...] = ()

    @property
    def files(self) -> int:
        return sum(len(root) for root in self.roots)

    @property
    def size_bytes(self) -> int:
        return sum(entry.size for root in self.roots for entry in root)


def encoded(manifest: Manifest) -> bytes:
    """The manifest as it lies in a store and goes over a connection: always the same bytes."""
    return msgspec.json.encode(manifest)


def decoded(data: bytes, version: VersionId = NO_VERSION) -> Manifest:
    """The manifest in these bytes. CodeBroken if it is none, or not the one of `version`."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
        problem = problem_of(manifest)
    except (msgspec.DecodeError, UnicodeError) as error:
        problem = str(error)
    if problem is not None:
        raise CodeBroken(f"The manifest of code version {short(version)} is bad: {problem}.")
    if version not in (NO_VERSION, found := version_of(manifest)):
        raise CodeBroken(
            f"The manifest of code version {short(version)} is that of {short(found)}."
        )
    return manifest


def version_of(manifest: Manifest) -> VersionId:
    """The id of what it lists."""
    return VersionId(hashlib.sha256(FORMAT + encoded(manifest)).hexdigest())


def is_version(text: str) -> bool:
    """Whether this could be an id: nothing else becomes the name of a directory."""
    return _VERSION.fullmatch(text) is not None


def short(version: VersionId) -> str:
    """The id as people read it."""
    return version[:SHORT] or "(none)"


def changed(old: Manifest, new: Manifest) -> tuple[str, ...]:
    """Paths that differ between the two, sorted; of roots after the first with "root-N/"."""
    found: list[str] = []
    for number in range(max(len(old.roots), len(new.roots))):
        before, after = by_path(old, number), by_path(new, number)
        paths = before.keys() | after.keys()
        found += [
            shown(number, path) for path in sorted(paths) if before.get(path) != after.get(path)
        ]
    return tuple(found)


def by_path(manifest: Manifest, root: int) -> dict[str, Entry]:
    """The entries of one root; of a root that it does not have, none."""
    entries = manifest.roots[root] if root < len(manifest.roots) else ()
    return {entry.path: entry for entry in entries}


def shown(root: int, path: str) -> str:
    """A path as people read it."""
    return f"root-{root}/{path}" if root else path


def problem_of(manifest: Manifest) -> str | None:
    """Why no version may be made of it, as a clause; None if it is sound.

    What it lists is written as it says, so nothing in it may lead out of its root: links may,
    but no file is ever written through one.
    """
    for number, entries in enumerate(manifest.roots):
        paths = [entry.path for entry in entries]
        if paths != sorted(set(paths)):
            return f"the paths of root {number} are not sorted, or one is there twice"
        leaves = set(paths)
        for entry in entries:
            problem = _problem_of_path(entry.path) or _problem_of_content(entry)
            if problem is None and not leaves.isdisjoint(parents(entry.path)):
                problem = "lies below a file or a link"
            if problem is not None:
                return f"{shown(number, entry.path)!r} {problem}"
    return None


def parents(path: str) -> list[str]:
    """The directories that a path goes through, without the root itself."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]


def _problem_of_path(path: str) -> str | None:
    if "\0" in path or len(path.encode(errors="surrogatepass")) > PATH_BYTES_MAX:
        return "is no path"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "leads out of its root, or is not in its shortest form"
    if not _is_text(path):
        return "is not UTF-8"
    return None


def _problem_of_content(entry: Entry) -> str | None:
    if entry.target:
        if entry.digest or entry.size or entry.executable:
            return "is both a file and a link"
        return _problem_of_target(entry)
    if not is_version(entry.digest) or entry.size < 0:
        return "has no digest, or no size"
    return None


def _problem_of_target(entry: Entry) -> str | None:
    target = entry.target
    if "\0" in target or not _is_text(target) or len(target.encode()) > PATH_BYTES_MAX:
        return "is a link to no path"
    if not target.startswith("/") and not stays_inside(entry.path, target):
        return f"is a relative link out of its root, to {target!r}"
    return None


def stays_inside(path: str, target: str) -> bool:
    """Whether a relative link at this path leads to something in the same root, by its words."""
    depth = path.count("/")
    for part in target.split("/"):
        depth += 0 if part in ("", ".") else -1 if part == ".." else 1
        if depth < 0:
            return False
    return True


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
