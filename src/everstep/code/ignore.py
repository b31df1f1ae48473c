"""What of a source root is left out of its versions, by name. Pure; snapshot.py and git.py ask.

Some names are left out in silence: what tools make of the source. What `.everstepignore` names is
not copied either, but is linked to where it lies, so that a script still finds its data beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from everstep.model import UserError, Value

IGNORE_FILE = ".everstepignore"
_LEFT_OUT = frozenset(
    {
        *(".git", ".hg", ".svn", ".DS_Store"),
        *("__pycache__", ".venv", "venv", "node_modules"),
        *(".mypy_cache", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints"),
    }
)
_LEFT_OUT_PATTERNS = ("*.pyc", "*.swp", ".#*", ".nfs*")
"""Compiled files, what editors write while a file is open, and open files that NFS removed."""
VENV_MARK = "pyvenv.cfg"
"""A directory with this file in it is a virtual environment, whatever its name."""


class Pattern(Value, frozen=True, kw_only=True):
    """One line of .everstepignore."""

    glob: str
    anchored: bool
    """It has a slash: it is about a path from the root on. Else about a name, wherever it is."""
    directory: bool
    """It ended with a slash: it is about directories only."""


def left_out(name: str) -> bool:
    """Whether something of this name is never part of a version."""
    return name in _LEFT_OUT or any(fnmatchcase(name, pattern) for pattern in _LEFT_OUT_PATTERNS)


def patterns_in(text: str, where: str) -> tuple[Pattern, ...]:
    """The lines of an .everstepignore; UserError for one that would not be understood."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        glob = line.strip()
        if not glob or glob.startswith("#"):
            continue
        if glob.startswith("!"):
            raise UserError(
                f"{where}, line {number}: {glob!r} would take something back, which is not known "
                "here: name only what is to be linked."
            )
        bare = glob.strip("/")
        if bare:
            anchored = "/" in glob.rstrip("/")
            found.append(Pattern(glob=bare, anchored=anchored, directory=glob.endswith("/")))
    return tuple(found)


def ignored(patterns: Sequence[Pattern], path: str, *, directory: bool) -> bool:
    """Whether one of the patterns names this path."""
    name = path.rpartition("/")[2]
    return any(
        fnmatchcase(path if pattern.anchored else name, pattern.glob)
        for pattern in patterns
        if directory or not pattern.directory
    )
