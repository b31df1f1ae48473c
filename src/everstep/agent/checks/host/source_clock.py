"""Source "clock": what the kernel thinks of its own clock, and whether somebody set it.

Judged by clock.py. Logs of many machines can only be put in order, and tokens only be valid, if
their clocks agree.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import ClassVar

from everstep.agent.checks.check import Here, Source
from everstep.agent.checks.host.reading import read, readable
from everstep.model import Seconds, Value

_CLOCKSOURCE = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
_UNSYNCHRONISED = 0x40
"""STA_UNSYNC of <linux/timex.h>."""
_NANOSECONDS = 0x2000
"""STA_NANO: `offset` is in nanoseconds, not in microseconds."""


class ClockSample(Value, frozen=True, kw_only=True):
    """Of one moment."""

    ahead_s: Seconds
    """Wall clock minus time since the boot. Both are slewed alike: it changes only if the clock is
    set, or the machine was frozen."""
    offset_s: Seconds | None = None
    """How far the clock is off, as far as its time server tells; None: the kernel does not say."""
    synchronised: bool = False
    clocksource: str = ""
    """The device that time is read from; empty: not known."""


class _Timex(ctypes.Structure):
    """struct timex of adjtimex(2), with its padding."""

    _fields_: ClassVar = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 512),
    ]


class Clock(Source[ClockSample]):
    """Asks adjtimex(2), which anybody may, and compares two clocks."""

    name: ClassVar[str] = "clock"
    kind: ClassVar[type[Value]] = ClockSample
    every_s: ClassVar[Seconds] = 60.0

    def absent(self, here: Here) -> str:
        del here
        return ""

    def sample(self, here: Here) -> ClockSample:
        ahead_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        kernel = readable(_adjtimex)
        offset_s = None
        if kernel is not None:
            unit = 1e-9 if kernel.status & _NANOSECONDS else 1e-6
            offset_s = max(abs(kernel.offset) * unit, kernel.esterror * 1e-6)
        source = readable(lambda: read(here, _CLOCKSOURCE)) or ""
        return ClockSample(
            ahead_s=ahead_s,
            offset_s=offset_s,
            synchronised=kernel is not None and not kernel.status & _UNSYNCHRONISED,
            clocksource=source.strip(),
        )


def _adjtimex() -> _Timex:
    """OSError where a container forbids the call."""
    timex = _Timex()  # modes = 0: ask, change nothing
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"adjtimex: {os.strerror(number)}")
    return timex
