"""Lets this process be looked into, or else has it write its stacks when the agent sends a signal.

agent/rank_main.py calls `let_be_traced`, and attach() too, as they do `register`, for where py-spy
may not look all the same. faulthandler writes stacks from the signal's handler, while another
thread holds the interpreter's lock too; until then it costs nothing. A forked child inherits both,
a program that replaces the process only that it may be looked into.
"""

from __future__ import annotations

import ctypes
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
_PR_SET_PTRACER = 0x59616D61
_ANY = ctypes.c_ulong(-1)


def let_be_traced() -> bool:
    """Let processes of the same user look into this one and into those that it forks from Python.

    That is so by itself unless the kernel has Yama (security/yama): with ptrace_scope 1, as on
    Ubuntu, only a process's ancestors may, and the agent that looks is none of a rank's. It changes
    nothing where only root may (2), or nobody (3). False if this kernel does not know of Yama.
    """
    known = _allow_any_tracer()
    if known and not _children_do:
        _children_do.append(True)
        os.register_at_fork(after_in_child=_allow_any_tracer)
    return known


_children_do: list[bool] = []
"""Not empty if forked children do the same: a hook cannot be taken back, so there is only one."""


def _allow_any_tracer() -> bool:
    done: int = ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)
    return done == 0


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
