"""Lets other processes of the same user look into this one: py-spy, which shows what a rank does.

That is so by itself unless the kernel has Yama: with ptrace_scope 1, as on Ubuntu, only ancestors
may look, and the agent is none of a rank's. It changes nothing where only root may (2), or nobody
(3); there dumping.py has ranks write their stacks. Called by agent/rank_main.py, which covers
whatever program a rank becomes, by attach() for what such a program starts, and by `everstep
check`, which tries it on itself.
"""

from __future__ import annotations

import ctypes
import os

_PR_SET_PTRACER = 0x59616D61
_ANY = ctypes.c_ulong(-1)
_children_do: list[bool] = []
"""Not empty if forked children do the same: a hook cannot be taken back, so there is only one."""


def let_be_traced() -> bool:
    """Do it, here and in whatever is forked from Python. False if this kernel has no Yama."""
    known = _allow_any_tracer()
    if known and not _children_do:
        _children_do.append(True)
        os.register_at_fork(after_in_child=_allow_any_tracer)
    return known


def _allow_any_tracer() -> bool:
    done: int = ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)
    return done == 0
