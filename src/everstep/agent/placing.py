"""Where a code version lies on this machine, and what that changes for the process that runs it.

A version that does not lie in the user's own directories is run from the machine's store: what
pointed into a source root (the script, entries of sys.path) points into the version's copy of it
then. Everything else stays, the working directory too. Used by rank_main.py and trial.py in fresh
forks of the launcher, and by code.py, which says what lies where.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from everstep.model import Value

CODE_VERSION = "EVERSTEP_CODE_VERSION"
"""Environment variable of ranks: the id of the code version that they run."""
PLACED = "EVERSTEP_PLACED"
"""Environment variable that carries the places over the exec of a fresh interpreter."""
_OURS = "everstep"


class Placed(Value, frozen=True, kw_only=True, array_like=True):
    """One source root, and the directory that stands in for it."""

    root: str
    now: str


Places = tuple[Placed, ...]
"""Empty: the version lies where its roots are, and nothing is to be moved."""


def moved(path: str, places: Places) -> str:
    """Where this absolute path lies in the version; itself if it is in none of its roots."""
    if not places:
        return path
    for lexical in (os.path.normpath(path), os.path.realpath(path)):
        for place in _innermost_first(places):
            for root in (place.root, os.path.realpath(place.root)):
                if lexical == root or lexical.startswith(f"{root}/"):
                    return place.now + lexical[len(root) :]
    return path


def move_paths(entries: Sequence[str], places: Places) -> list[str]:
    """Entries of sys.path, those in a root moved. What the version does not have stays: a virtual
    environment inside of a root is no code of its version.
    """
    return [_moved_entry(entry, places) for entry in entries]


def move_pythonpath(places: Places) -> None:
    """For the programs that this process starts, as for itself."""
    path = os.environ.get("PYTHONPATH")
    if places and path:
        entries = [str(Path.cwd() / each) for each in path.split(":")]
        os.environ["PYTHONPATH"] = ":".join(move_paths(entries, places))


def put_in_front(directory: str) -> None:
    """Of sys.path, as python does with the script's directory: not under PYTHONSAFEPATH."""
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, directory)


def forget_modules(places: Places) -> None:
    """What the launcher imported from a root (by --preload, or at Python's start) is another
    version's, and is imported anew.
    """
    roots = tuple(f"{os.path.realpath(place.root)}/" for place in places)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or name.partition(".")[0] in (_OURS, "__main__"):
            continue
        # Asked first: it takes no system call, and spares some two thousand files the next one.
        if not _of_python(file) and os.path.realpath(file).startswith(roots):
            del sys.modules[name]


def packed(places: Places) -> str:
    """As the value of an environment variable."""
    return msgspec.json.encode(places).decode()


def unpacked(text: str) -> Places:
    return msgspec.json.decode(text, type=Places)


def _innermost_first(places: Places) -> list[Placed]:
    return sorted(places, key=lambda place: -len(place.root))


def _moved_entry(entry: str, places: Places) -> str:
    if not entry.startswith("/") or _of_python(entry):
        return entry
    there = moved(entry, places)
    return there if there == entry or Path(there).exists() else entry


_HOMES = tuple(
    f"{home}/" for home in {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
)


def _of_python(path: str) -> bool:
    """Whether it is part of the interpreter's environment, which may lie inside of a root."""
    return path.startswith(_HOMES)
