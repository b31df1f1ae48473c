"""What two processes that do the same have in common, as 16 hex digits.

Agents name stacks by it (agent/tracing/), so that the text of each travels to the controller once.
ByteRobust (section 5.1) groups by string matching and leaves open which string. Here it is what
activity.py reads from a stack and the functions that led there: processes with equal fingerprints
do the same by any of its stacks. `signature` of frames.py is coarser: it looks less deep.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b

from everstep.diagnosis.activity import INNERMOST, activity_of, of_the_step, of_user
from everstep.diagnosis.frames import Frame, Thread, plain

DEEPEST = 200
"""Frames of one thread that are looked at: a runaway recursion is longer."""
_NATIVE = re.compile(r"\.so\b|\.(c|h|cc|cpp|cxx|cu|hpp|pyx)$|^(\?|\[.*\])$")
_ADDRESS = re.compile(r"^0x[0-9a-fA-F]+$")
_IN_NAMES = re.compile(r"0x[0-9a-fA-F]+")
_IMPORTS = ("_call_with_frames_removed", "exec_module")
"""What lies below the <module> of an import; that of the script itself has a launcher below."""


def fingerprint_of(threads: Iterable[Thread], role: str = "") -> str:
    """Of one process. `role`: what it is to its rank, so that a worker is never like a trainer.

    Left out is what differs between processes that do the same: addresses, lines, paths, thread
    ids, the order of threads, what launched the script, the depth of a recursion, threads that
    serve or that the program started on its own. Of frames below Python only what they wait for
    counts: a rank that waits for others spins, and is seen in one of many functions.
    """
    threads = tuple(threads)
    shown = [thread for thread in threads if thread.main or of_the_step(thread)] or threads
    text = "|".join([role, *sorted(";".join(_frames(thread.frames)) for thread in shown)])
    return blake2b(text.encode(), digest_size=8).hexdigest()


def _frames(frames: Sequence[Frame]) -> list[str]:
    """What counts, from the innermost outwards; of what recurs the innermost only."""
    tokens = (
        _token(frame.name, frame.file, near=at < INNERMOST)
        for at, frame in enumerate(_to_its_start(frames[:DEEPEST]))
    )
    return list(dict.fromkeys(token for token in tokens if token))


def _to_its_start(frames: Sequence[Frame]) -> Iterator[Frame]:
    """Without what launched the script, or the process."""
    for at, frame in enumerate(frames):
        yield frame
        below = plain(frames[at + 1].name) if at + 1 < len(frames) else ""
        name = plain(frame.name)
        if name == "_bootstrap" or (name == "<module>" and below not in _IMPORTS):
            return


@lru_cache(maxsize=1 << 14)
def _token(name: str, file: str, *, near: bool) -> str:
    """What counts of one frame; empty: nothing."""
    if _ADDRESS.match(name):
        return ""
    short = plain(name)
    activity = activity_of(short, file, near=near)
    if "::" in short or _NATIVE.search(file):
        return activity.name if activity is not None else ""
    owner = "!" if of_user(file) else ""
    return f"{owner}{_IN_NAMES.sub('', short)}:{activity.name if activity is not None else ''}"
