"""Real directories for the tests of code versions."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from everstep.code.manifest import Entry, Manifest

NOBODY = 65534
TREE: dict[str, bytes | str] = {
    "train.py": b"import net\n",
    "net/__init__.py": b"",
    "net/layers.py": b"width = 8\n",
    "configs/small.yaml": b"lr: 1\n",
    "latest.yaml": "configs/small.yaml",
}


def plant(root: Path, tree: Mapping[str, bytes | str]) -> Path:
    """Files with these contents; a text is the target of a link."""
    root.mkdir(parents=True, exist_ok=True)
    for path, content in tree.items():
        where = root / path
        where.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            where.symlink_to(content)
        else:
            where.write_bytes(content)
    return root


def contents(root: Path) -> dict[str, bytes | str]:
    """What `plant` would make it of: links are not followed."""
    found: dict[str, bytes | str] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


def file(path: str, content: bytes = b"", *, executable: bool = False) -> Entry:
    return Entry(
        path=path,
        digest=sha256(content).hexdigest(),
        size=len(content),
        executable=executable,
    )


def link(path: str, target: str) -> Entry:
    return Entry(path=path, target=target)


def listing(*entries: Entry) -> Manifest:
    """One root with these entries, sorted."""
    return Manifest(roots=(tuple(sorted(entries, key=lambda entry: entry.path)),))


def targets(manifest: Manifest) -> dict[str, str]:
    return {entry.path: entry.target for entry in manifest.roots[0] if entry.target}


def paths(manifest: Manifest) -> list[str]:
    return [entry.path for entry in manifest.roots[0]]


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without root's right to read everything."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
