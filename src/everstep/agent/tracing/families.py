"""Which processes belong to each rank, and what they are to it.

py-spy does not list children in a dump, so they are found here: whatever descends from a rank or
is in its session, zombies too. Used by tracer.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from everstep.diagnosis.frames import Thread
from everstep.looks import Role
from everstep.processes import Entry

CHILDREN_MAX = 128
"""Of one rank. Data loaders have at most some dozens of workers; the nearest are kept."""
_LOADER = re.compile(r"torch/utils/data/.*worker\.py|_utils/worker\.py")
_SAVER = re.compile(r"checkpoint|ckpt", re.IGNORECASE)
_COMPILER = re.compile(r"compile_worker")
_COMPILERS = frozenset(
    [
        "nvcc",
        "cicc",
        "ptxas",
        "cudafe++",
        "hipcc",
        "gcc",
        "g++",
        "cc1",
        "cc1plus",
        "clang",
        "clang++",
        "as",
        "ld",
        "collect2",
        "ninja",
    ]
)
_LOADER_NAME = "pt_data_worker"
"""What torch calls its workers, for whoever sees no stack."""


def family(root: int, table: Mapping[int, Entry]) -> list[Entry]:
    """Children of this process, their children and so on, the nearest first."""
    below: dict[int, list[int]] = {}
    for pid, entry in table.items():
        below.setdefault(entry.parent, []).append(pid)
    orphans = [pid for pid, entry in table.items() if entry.session == root]
    found: dict[int, None] = {root: None}
    waiting = [root]
    while waiting:
        waiting = [
            child for pid in waiting for child in sorted(below.get(pid, ())) if child not in found
        ]
        found.update(dict.fromkeys(waiting))
    pids = dict.fromkeys([*found, *orphans])
    return [table[pid] for pid in pids if pid != root and pid in table][:CHILDREN_MAX]


def role_of(entry: Entry, command: Iterable[str], threads: Iterable[Thread]) -> Role:
    """What a child is to its rank, by its stack, else by its name and command."""
    files = [frame.file for thread in threads for frame in thread.frames]
    names = [frame.name for thread in threads for frame in thread.frames]
    words = " ".join(command)
    if entry.name.startswith(_LOADER_NAME) or (
        any(name.endswith("_worker_loop") for name in names) and any(map(_LOADER.search, files))
    ):
        return Role.LOADER
    if entry.name in _COMPILERS or _COMPILER.search(words) or any(map(_COMPILER.search, files)):
        return Role.COMPILER
    if any(map(_SAVER.search, files)) or any(map(_SAVER.search, names)):
        return Role.SAVER
    return Role.CHILD
