"""Has this process write its stacks when the agent sends a signal: for where py-spy may not look.

agent/rank_main.py and attach() call `register` once. faulthandler writes them from the signal's
handler, while another thread holds the interpreter's lock too; until then it costs nothing. A
forked child inherits it, a program that replaces the process does not.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import resource
import signal
from pathlib import Path

SIGNAL = signal.SIGRTMAX - 7
"""Nobody is known to use it: glibc takes the lowest, and service managers count from there on."""
FROM_DESCRIPTOR = 200
"""Out of the way: scripts that are particular about small numbers find them free."""
_registered: list[int] = []
"""The pid that did it."""


def file_of(shm: Path, local_rank: int) -> Path:
    """Where the stacks of this rank are written, and those of its children."""
    return shm / f"stacks-{local_rank}"


def register(shm: Path, local_rank: int) -> None:
    """Do it, unless somebody else listens to the signal. OSError if there is no room."""
    if os.getpid() in _registered or _taken():
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
    low = os.open(file_of(shm, local_rank), flags, 0o600)
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptor = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, min(FROM_DESCRIPTOR, most // 2))
    os.close(low)
    # No chain: what would come next is to die of the signal.
    faulthandler.register(SIGNAL, file=descriptor, all_threads=True, chain=False)
    _registered[:] = [os.getpid()]


def _taken() -> bool:
    """Whether it is caught or ignored already, by code below Python too."""
    status = Path("/proc/self/status").read_text(errors="replace")
    masks = [line.split() for line in status.splitlines() if line.startswith(("SigIgn", "SigCgt"))]
    return any(int(mask, 16) >> (SIGNAL - 1) & 1 for _, mask in masks)
