"""A commit of a git repository as a snapshot, for `everstep update REF`.

It asks the `git` program, and only for what is in the repository: no filter runs, nothing is
checked out. What a commit only refers to (submodules, files in LFS), and what .everstepignore
names, is linked to where it lies in the working tree.
"""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from everstep.code.ignore import IGNORE_FILE, Pattern, ignored, left_out, patterns_in
from everstep.code.manifest import Entry, Manifest
from everstep.code.reading import Opener
from everstep.code.snapshot import (
    LIMITS,
    Limits,
    Snapshot,
    Tally,
    link_target,
    patterns_of,
    settle,
    some,
    utf8,
)
from everstep.model import UserError, Value

GIT_WITHIN_S = 120.0
"""For one call of git: a partial clone may fetch what it lacks."""
_LINK = "120000"
_SUBMODULE = "160000"
_EXECUTABLE = "100755"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_LFS_BYTES_MAX = 1024
_TREE_LINE = re.compile(rb"(\d+) (\w+) (\w+) +(\d+|-|BAD)\t(.*)", re.DOTALL)
_BLOB_HEAD = re.compile(rb"\w+ blob (\d+)\n")


class _Item(NamedTuple):
    """One line of `git ls-tree`."""

    mode: str
    blob: str
    size: int
    path: str


class _Tree(NamedTuple):
    """One directory in one commit."""

    root: Path
    commit: str
    items: list[_Item]


class _Contents(NamedTuple):
    """The content of blobs, in a file without a name: it goes when nobody needs it any more."""

    data: mmap.mmap | bytes
    at: dict[str, tuple[int, int]]
    """Blob -> offset and size."""

    def read(self, blob: str) -> bytes:
        offset, size = self.at[blob]
        return self.data[offset : offset + size]

    def opener(self, blob: str) -> Opener:
        return partial(self._open, blob)

    def _open(self, blob: str) -> BinaryIO:
        return io.BytesIO(self.read(blob))


class _Linked(Value, frozen=True, kw_only=True):
    """Paths that are not versioned, by why."""

    ignored: list[str] = []
    submodules: list[str] = []
    in_lfs: list[str] = []

    def remarks(self) -> list[str]:
        reasons = (
            (self.submodules, "Git submodules are linked to the working tree and not versioned"),
            (self.in_lfs, "Files in Git LFS are linked to the working tree and not versioned"),
        )
        return [f"{reason}: {some(paths)}." for paths, reason in reasons if paths]


def at_ref(root: Path, ref: str, limits: Limits = LIMITS) -> Snapshot:
    """One source root as it is in the commit, tag or branch `ref` of the repository around it.

    Snapshot.commit is the commit's full id. UserError if there is no git, no repository, no such
    ref, or not this directory in it; CodeTooLarge.
    """
    tree = _tree_of(Path(os.path.abspath(root)), ref)
    tally = Tally(limits)
    patterns = _patterns(tree)
    linked = _Linked()
    kept: list[_Item] = []
    for item in tree.items:
        if any(left_out(name) for name in item.path.split("/")):
            continue
        above = _ignored_part(patterns, item.path)
        if above is not None or item.mode == _SUBMODULE:
            (linked.submodules if above is None else linked.ignored).append(above or item.path)
            continue
        tally.one_more(tree.root)
        tally.add_size(tree.root, item.path, item.size)
        kept.append(item)
    linked.ignored.extend(_ignored_here(tree.root, patterns))
    contents = _contents_of(tree.root, [item.blob for item in kept])
    return _snapshot(tree, kept, contents, linked)


def _snapshot(
    tree: _Tree, items: Sequence[_Item], contents: _Contents, linked: _Linked
) -> Snapshot:
    links: dict[str, str] = {}
    files: dict[str, _Item] = {}
    for item in items:
        if item.mode == _LINK:
            said = os.fsdecode(contents.read(item.blob))
            links[item.path] = utf8(link_target(tree.root, item.path, said), tree.root)
        elif _in_lfs(item, contents):
            linked.in_lfs.append(item.path)
        else:
            files[item.path] = item
    for path in (*linked.ignored, *linked.submodules, *linked.in_lfs):
        if (tree.root / path).exists():
            links[path] = f"{tree.root}/{path}"
        elif path in linked.in_lfs:
            files[path] = next(item for item in items if item.path == path)
    settle(links, list(files), tree.root)
    entries = {path: Entry(path=path, target=target) for path, target in links.items()}
    for path, item in files.items():
        data = contents.read(item.blob)
        entries[path] = Entry(
            path=path,
            digest=hashlib.sha256(data).hexdigest(),
            size=len(data),
            executable=item.mode == _EXECUTABLE,
        )
    return Snapshot(
        Manifest(roots=(tuple(entries[path] for path in sorted(entries)),)),
        ({path: contents.opener(item.blob) for path, item in files.items()},),
        (*linked.remarks(), *_not_in_it(tree.root, entries.keys())),
        tree.commit,
    )


def _in_lfs(item: _Item, contents: _Contents) -> bool:
    return item.size <= _LFS_BYTES_MAX and contents.read(item.blob).startswith(_LFS_POINTER)


# --- what is ignored -----------------------------------------------------------------------------


def _patterns(tree: _Tree) -> tuple[Pattern, ...]:
    """Of the commit's .everstepignore; if it has none, of the working tree's."""
    for item in tree.items:
        if item.path == IGNORE_FILE and item.mode != _LINK:
            text = _contents_of(tree.root, [item.blob]).read(item.blob).decode(errors="replace")
            return patterns_in(text, f"{IGNORE_FILE} of {tree.commit[:12]}")
    return patterns_of(tree.root)


def _ignored_part(patterns: Sequence[Pattern], path: str) -> str | None:
    """The part of the path that is ignored: a directory above it, or itself."""
    parts = path.split("/")
    for count in range(1, len(parts) + 1):
        part = "/".join(parts[:count])
        if ignored(patterns, part, directory=count < len(parts)):
            return part
    return None


def _ignored_here(root: Path, patterns: Sequence[Pattern]) -> list[str]:
    """What the patterns name in the working tree: data is there and in no commit."""
    found: list[str] = []
    for above, directories, files in os.walk(root) if patterns else ():
        below = os.path.relpath(above, root)
        prefix = "" if below == "." else f"{below}/"
        for name in list(directories):
            if left_out(name):
                directories.remove(name)
            elif ignored(patterns, f"{prefix}{name}", directory=True):
                directories.remove(name)
                found.append(utf8(f"{prefix}{name}", root))
        found += [
            utf8(f"{prefix}{name}", root)
            for name in files
            if not left_out(name) and ignored(patterns, f"{prefix}{name}", directory=False)
        ]
    return found


def _not_in_it(root: Path, paths: Iterable[str]) -> Iterator[str]:
    """A remark on what lies in the working tree, and would not be found beside the code."""
    known = {path.partition("/")[0] for path in paths}
    names = sorted(path.name for path in root.iterdir() if not left_out(path.name))
    lacking = [os.fsencode(name).decode(errors="replace") for name in names if name not in known]
    if lacking:
        yield (
            f"In {root}, but not in the commit and therefore not in the version: {some(lacking)}. "
            f"What {IGNORE_FILE} names is linked."
        )


# --- the git program -----------------------------------------------------------------------------


def _tree_of(root: Path, ref: str) -> _Tree:
    if not root.is_dir():
        raise UserError(f"{root} is not a directory.")
    if shutil.which("git") is None:
        raise UserError(f"There is no program git here, and {ref!r} is no directory: give one.")
    inside = _git(root, "rev-parse", "--show-prefix")
    if inside.returncode:
        raise UserError(f"{root} lies in no git repository that can be read: {_said(inside)}")
    prefix = os.fsdecode(inside.stdout.rstrip(b"\n"))
    commit = _git(root, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    if ref.startswith("-") or commit.returncode:
        raise UserError(
            f"The repository around {root} has no commit, branch or tag {ref!r}: see `git log`."
        )
    name = commit.stdout.decode().strip()
    listed = _git(root, "ls-tree", "-r", "-z", "-l", "--full-tree", f"{name}:{prefix}")
    if listed.returncode:
        raise UserError(f"Commit {name[:12]} ({ref}) has no directory {prefix}: {_said(listed)}")
    lines = listed.stdout.split(b"\0")
    return _Tree(root, name, [_item(line, root) for line in lines if line])


def _item(line: bytes, root: Path) -> _Item:
    match = _TREE_LINE.fullmatch(line)
    assert match is not None, line
    size = int(match[4]) if match[4].isdigit() else 0  # no size: it is asked for later in any case
    path = utf8(os.fsdecode(match[5]), root)
    return _Item(match[1].decode(), match[3].decode(), size, path)


def _contents_of(root: Path, blobs: Sequence[str]) -> _Contents:
    names = sorted(set(blobs))
    at: dict[str, tuple[int, int]] = {}
    with tempfile.TemporaryFile() as wanted, tempfile.TemporaryFile() as found:
        wanted.write("".join(f"{name}\n" for name in names).encode())
        wanted.seek(0)
        done = _git(root, "cat-file", "--batch", stdin=wanted, stdout=found)
        found.seek(0)
        for name in names:
            match = _BLOB_HEAD.fullmatch(found.readline())
            if match is None or done.returncode:
                raise UserError(f"Git cannot give the content of {name} in {root}: {_said(done)}")
            at[name] = (found.tell(), int(match[1]))
            found.seek(int(match[1]) + 1, os.SEEK_CUR)
        data = mmap.mmap(found.fileno(), 0, access=mmap.ACCESS_READ) if names else b""
    return _Contents(data, at)


def _git(
    root: Path, *words: str, stdin: BinaryIO | None = None, stdout: BinaryIO | None = None
) -> subprocess.CompletedProcess[bytes]:
    # Variables of a hook or of a person's shell would lead to another repository.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environ |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0"}
    try:
        return subprocess.run(
            ["git", "-C", str(root), *words],
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=subprocess.PIPE if stdout is None else stdout,
            stderr=subprocess.PIPE,
            env=environ,
            timeout=GIT_WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"Git did not answer within {GIT_WITHIN_S:.0f} s in {root}.") from error


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    """What git itself said, on one line."""
    words = (done.stderr or b"").decode(errors="replace").split()
    return " ".join(words) or f"git ended with {done.returncode}"
