"""Has a process write its stacks itself, where py-spy may not look: the other end of
trainer/dumping.py.

A process that has no handler for the signal would die of it. So it gets the signal only if the
kernel says that it catches it, does not hold it back, and has the file open that it is to write to.
A child that was just forked has all of that of its parent, and may become another program between
our look and the signal: it is left alone until it is old enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path

from msgspec.structs import replace

from everstep.agent.tracing import kernel
from everstep.diagnosis import stacks
from everstep.diagnosis.frames import Dump
from everstep.model import Seconds
from everstep.processes import Entry, send_signal
from everstep.trainer.dumping import SIGNAL

LOOK_EVERY_S: Seconds = 0.01
SETTLED = 4
"""Looks in which nothing was added: it was all. There is no mark at its end."""
BYTES_MAX = 1 << 20
YOUNG_S: Seconds = 2.0
"""Of a child: what is forked to become another program has done so by then."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


async def ask(entry: Entry, file: Path, within_s: Seconds) -> Dump | None:
    """Its stacks; None if it does not write them. One at a time for each file."""
    process = entry.process
    if _may_change(entry) or not kernel.has_open(process.pid, file):
        return None
    with contextlib.suppress(OSError):
        os.truncate(file, 0)
    if not kernel.takes(process.pid, SIGNAL):  # at last: nothing takes time from here to the signal
        return None
    try:
        if not send_signal(process, SIGNAL):
            return None
    except OSError:  # another user's
        return None
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(within_s):
            await _settled(file)
    dumps = stacks.read(_taken(file), "faulthandler")
    return _with_main(dumps[0]) if dumps else None


def _may_change(entry: Entry) -> bool:
    """A rank leads its session; whoever does not was forked by it."""
    born_at = entry.process.start_ticks / _TICKS_PER_S
    is_young = time.clock_gettime(time.CLOCK_BOOTTIME) - born_at < YOUNG_S
    return is_young and entry.session != entry.process.pid


def _with_main(dump: Dump) -> Dump:
    """faulthandler does not say which thread is the main one; the script's module lies below it."""
    threads = tuple(replace(each, main=each is dump.main) for each in dump.threads)
    return replace(dump, threads=threads)


def _size(file: Path) -> int:
    return file.stat().st_size


def _taken(file: Path) -> str:
    """Its content, which is then no longer there."""
    try:
        text = file.read_bytes()[:BYTES_MAX].decode("utf-8", errors="replace")
        os.truncate(file, 0)
    except OSError:
        return ""
    return text


async def _settled(file: Path) -> None:
    before, same = 0, 0
    while same < SETTLED:
        await asyncio.sleep(LOOK_EVERY_S)
        size = _size(file)
        same = same + 1 if size == before and size else 0
        before = size
