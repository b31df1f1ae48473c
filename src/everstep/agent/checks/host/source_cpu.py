"""Source "cpu": whether processors are slowed down by heat, switched off, or set to save power.

Judged by cpu.py.
"""

from __future__ import annotations

import os
from functools import partial
from typing import ClassVar

from everstep.agent.checks.check import Here, Source
from everstep.agent.checks.host.reading import missing, number, read, readable
from everstep.model import Seconds, Value

_DIRECTORY = "/sys/devices/system/cpu"


class CpuSample(Value, frozen=True, kw_only=True):
    """Of one moment."""

    online: int
    """Processors that are on."""
    throttles: int | None = None
    """How often processors were slowed down because of heat, all together; None: not counted."""
    governors: tuple[str, ...] = ()
    """What decides about their clocks: as a rule one for all."""


class Cpu(Source[CpuSample]):
    """Reads /sys/devices/system/cpu."""

    name: ClassVar[str] = "cpu"
    kind: ClassVar[type[Value]] = CpuSample
    every_s: ClassVar[Seconds] = 60.0

    def absent(self, here: Here) -> str:
        return f"there is no {_DIRECTORY}/online" if missing(here, f"{_DIRECTORY}/online") else ""

    def sample(self, here: Here) -> CpuSample:
        online = _range(read(here, f"{_DIRECTORY}/online"))
        counts = [
            readable(partial(number, here, f"{_DIRECTORY}/cpu{cpu}/thermal_throttle/{name}"))
            for cpu in online
            for name in ("core_throttle_count", "package_throttle_count")
        ]
        known = [count for count in counts if count is not None]
        return CpuSample(
            online=len(online),
            throttles=sum(known) if known else None,
            governors=tuple(sorted(_governors(here))),
        )


def _range(text: str) -> list[int]:
    """Numbers of "0-3,8,10-11"."""
    found: list[int] = []
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        first, last = int(low), int(high or low)
        if last - first > 1 << 16:
            raise ValueError(f"{part} are more processors than there can be")
        found += range(first, last + 1)
    return found


def _governors(here: Here) -> set[str]:
    try:
        names = os.listdir(here.path(f"{_DIRECTORY}/cpufreq"))  # noqa: PTH208
    except OSError:
        return set()
    looks = (
        readable(partial(read, here, f"{_DIRECTORY}/cpufreq/{name}/scaling_governor"))
        for name in names
        if name.startswith("policy")
    )
    return {text.strip() for text in looks if text}
