"""Where samples of the kernel log come from: /dev/kmsg, or the node service if only root may.

One source for both, so that every check of the kernel log says the same wherever it runs. The
runner reads it when its descriptor is readable; the descriptor is another one after the node
service was restarted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from everstep.agent.checks.check import Here, NotReadable, Source
from everstep.agent.checks.kernel.feed import NodeFeed
from everstep.agent.checks.kernel.kmsg import Kmsg, boot_id, pstore
from everstep.agent.checks.kernel.lines import KernelLog, Line, Ours
from everstep.agent.checks.kernel.ours import Inventory
from everstep.model import Seconds

DEVICE = "/dev/kmsg"
INVENTORY_S: Seconds = 30.0
"""Between two looks at what the job uses: mounts and interfaces change seldom."""
MOST_ASKED = 32
"""Processes of one sample whose ancestors are looked for."""


class KernelSource(Source[KernelLog]):
    """The kernel log of this boot."""

    name = "kernel"
    kind = KernelLog
    every_s = 5.0

    def __init__(self) -> None:
        self._reader: Kmsg | NodeFeed | None = None
        self._inventory = Inventory()
        self._ours = Ours()
        self._looked: Seconds = -INVENTORY_S
        self._looked_for: Here | None = None

    def absent(self, here: Here) -> str:
        served = bool(here.node_socket) and Path(here.node_socket).exists()
        if served or here.path(DEVICE).exists() or self._reader is not None:
            return ""
        return f"there is no {DEVICE} here, and no node service"

    def fileno(self, here: Here) -> int | None:
        if self._reader is None:
            with contextlib.suppress(NotReadable):
                self._reader = _open(here)
        return None if self._reader is None else self._reader.fileno()

    def sample(self, here: Here) -> KernelLog:
        if self._reader is None:
            self._reader = _open(here)
        try:
            new = self._reader.look()
        except (OSError, NotReadable):
            self.close()
            raise
        known = self._reader.known()
        if isinstance(self._reader, Kmsg):
            known = msgspec.structs.replace(known, pstore=pstore(Path(here.root)))
        return msgspec.structs.replace(known, ours=self._attributed(here, new))

    def close(self) -> None:
        """Give the descriptor back; the next sample opens it anew."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _attributed(self, here: Here, new: Iterable[Line]) -> Ours:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        if here != self._looked_for or now - self._looked >= INVENTORY_S:
            self._looked, self._looked_for = now, here
            self._ours = self._inventory.look(here)
        pids = {name for line in new if (name := line.names.get("pid", "")).isdecimal()}
        if pids:
            asked = [int(pid) for pid in sorted(pids)[:MOST_ASKED]]
            self._ours = self._inventory.look_at_processes(here, asked)
        return self._ours


def _open(here: Here) -> Kmsg | NodeFeed:
    """Ask the kernel first: nothing can come between."""
    boot = here.boot_id or boot_id(Path(here.root))
    try:
        return Kmsg(here.path(DEVICE), boot)
    except NotReadable as refused:
        advice = "this user needs the node service (`everstep check --serve`, as root)"
        if not here.node_socket:
            raise NotReadable(f"{refused}: {advice}") from refused
        try:
            return NodeFeed(Path(here.node_socket), boot)
        except NotReadable as also:
            raise NotReadable(f"{refused}, and {also}: {advice}") from also
