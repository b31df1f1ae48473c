"""Source "edac": errors of the machine's main memory, as its memory controllers count them.

Judged by edac.py.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import ClassVar

from everstep.agent.checks.check import Here, Source
from everstep.agent.checks.host.reading import missing, number
from everstep.model import Seconds, Value

_DIRECTORY = "/sys/devices/system/edac/mc"
_NAME = re.compile(r"mc\d+")


class Controller(Value, frozen=True, kw_only=True):
    """One memory controller, since the boot."""

    corrected: int
    uncorrected: int


class EdacSample(Value, frozen=True, kw_only=True):
    """Of one moment."""

    controllers: dict[str, Controller]
    """"mc0" -> its counts."""


class Edac(Source[EdacSample]):
    """Reads /sys/devices/system/edac/mc/mcN/{ce,ue}_count."""

    name: ClassVar[str] = "edac"
    kind: ClassVar[type[Value]] = EdacSample
    every_s: ClassVar[Seconds] = 60.0

    def absent(self, here: Here) -> str:
        with contextlib.suppress(PermissionError):  # `sample` tells
            if not _names(here):
                return "the kernel has no driver for this machine's memory controllers (EDAC)"
        return ""

    def sample(self, here: Here) -> EdacSample:
        return EdacSample(
            controllers={
                name: Controller(
                    corrected=number(here, f"{_DIRECTORY}/{name}/ce_count"),
                    uncorrected=number(here, f"{_DIRECTORY}/{name}/ue_count"),
                )
                for name in _names(here)
            }
        )


def _names(here: Here) -> list[str]:
    if missing(here, _DIRECTORY):
        return []
    names = os.listdir(here.path(_DIRECTORY))  # noqa: PTH208
    return sorted(name for name in names if _NAME.fullmatch(name))
