"""Reads /dev/kmsg, never waiting, and keeps the lines that a rule knows.

Used by the agent (source.py) if it may read the log, and by the node service (checks/node.py),
which reads it as root for those that may not. A reader starts at the oldest record of this boot
that the kernel still has, so a restarted agent sees again what the one before saw.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections import OrderedDict, deque
from pathlib import Path

from everstep.agent.checks.check import NotReadable
from everstep.agent.checks.kernel.attribution import thing_of
from everstep.agent.checks.kernel.lines import TEXT_MAX, KernelLog, Line
from everstep.agent.checks.kernel.records import Record, parse
from everstep.agent.checks.kernel.table import KernelTable, own_table
from everstep.model import Seconds

RECORD_BYTES = 16_384
"""Of one read: the kernel refuses (EINVAL) what is shorter than the record, at most 8 KiB or so."""
MOST_AT_ONCE = 400
"""Records of one look: a few ms. With fifty looks a second 20,000 lines a second are kept up with;
beyond that the kernel overwrites, and what is lost is counted."""
MOST_AT_FIRST = 100_000
"""Records of the first look, which reads what there is since boot: more than common buffers hold,
so that what comes after it is new. Half a second at the very worst, once."""
GARBAGE_AT_ONCE = 1_000
"""Reads that fail in one look before it ends."""
KMSG_DEVICE = (1, 11)
"""Major and minor: a container's /dev/kmsg may be a link to /dev/null or to a console."""


class Remembered:
    """The newest lines of each kind about each thing: a storm of one drowns no other."""

    KINDS = 48
    """Rule and thing: the one that was silent for longest goes first."""
    OF_A_KIND = 12
    """At least as many as any rule counts."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[tuple[str, str], deque[Line]] = OrderedDict()
        self.forgotten = 0

    def add(self, line: Line, thing: str) -> None:
        kind = (line.rule, thing)
        same = self._kinds.setdefault(kind, deque(maxlen=self.OF_A_KIND))
        self._kinds.move_to_end(kind)
        self.forgotten += len(same) == self.OF_A_KIND
        same.append(line)
        if len(self._kinds) > self.KINDS:
            self.forgotten += len(self._kinds.popitem(last=False)[1])

    def lines(self) -> tuple[Line, ...]:
        """Oldest first."""
        every = (line for same in self._kinds.values() for line in same)
        return tuple(sorted(every, key=lambda line: line.seq))


class Kmsg:
    """One reader. NotReadable if this user may not, or there is no kernel log here."""

    def __init__(self, path: Path, boot_id: str, table: KernelTable | None = None) -> None:
        self._table = table or own_table()
        self._remembered = Remembered()
        self._boot_id = boot_id
        self._fd = _open(path)
        self._opened = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._skew: Seconds = 0.0
        self._caught_up = False
        self.oldest = -1
        self.seq = -1
        self.read = self.garbage = self.overruns = self.lost = 0

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)

    def look(self) -> list[Line]:
        """Read what is new, and say which lines of it a rule knows."""
        found: list[Line] = []
        newest: Record | None = None
        failed = 0
        for _ in range(MOST_AT_ONCE if self._caught_up else MOST_AT_FIRST):
            try:
                raw = os.read(self._fd, RECORD_BYTES)
            except BlockingIOError:
                self._is_up_to_date(newest)
                break
            except BrokenPipeError:
                self.overruns += 1
                continue
            except OSError:
                self.garbage += 1
                failed += 1
                if failed > GARBAGE_AT_ONCE:
                    break
                continue
            if not raw:
                break
            newest = self._take(raw, found) or newest
        return found

    def _take(self, raw: bytes, found: list[Line]) -> Record | None:
        self.read += 1
        record = parse(raw)
        if record is None:
            self.garbage += 1
            return None
        if self.seq < 0:
            self.oldest = record.seq
        else:
            self.lost += max(0, record.seq - self.seq - 1)
        self.seq = record.seq
        match = self._table.match(record)
        if match is not None:
            rule, names, text = match
            line = Line(
                seq=record.seq, at=record.at, rule=rule.id, names=names, text=text[:TEXT_MAX]
            )
            self._remembered.add(line, thing_of(rule, names))
            found.append(line)
        return record

    def _is_up_to_date(self, newest: Record | None) -> None:
        """What was read just now was just written, unless it is all since boot.

        So the log's clock is known: it begins with CLOCK_BOOTTIME, but nothing corrects it.
        """
        if newest is not None and self._caught_up:
            self._skew = time.clock_gettime(time.CLOCK_BOOTTIME) - newest.at
        self._caught_up = True

    def known(self) -> KernelLog:
        """All that is known now."""
        return KernelLog(
            boot_id=self._boot_id,
            by="/dev/kmsg",
            opened=self._opened,
            oldest=self.oldest,
            seq=self.seq,
            clock=time.clock_gettime(time.CLOCK_BOOTTIME) - self._skew,
            lines=self._remembered.lines(),
            read=self.read,
            garbage=self.garbage,
            overruns=self.overruns,
            lost=self.lost,
            forgotten=self._remembered.forgotten,
        )


def _open(path: Path) -> int:
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise NotReadable(f"{path} cannot be read: {error.strerror}") from error
    found = os.fstat(opened)
    device = (os.major(found.st_rdev), os.minor(found.st_rdev))
    if not stat.S_ISCHR(found.st_mode) or device != KMSG_DEVICE:
        os.close(opened)
        raise NotReadable(f"{path} is not the kernel log")
    return opened


def boot_id(root: Path = Path("/")) -> str:
    """Of the machine below that root; empty if it does not say."""
    with contextlib.suppress(OSError, ValueError):
        return (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def pstore(root: Path) -> tuple[str, ...] | None:
    """What a crashed kernel left; None: this user may not look, or nothing can be kept here."""
    try:
        return tuple(sorted(os.listdir(root / "sys/fs/pstore"))[:64])  # noqa: PTH208 - names
    except OSError:
        return None
