"""Follows the ranks' log files: new lines for people, and a bound on the space they take.

Ranks append to files and never know who reads. The file is the buffer: while no controller listens
nothing is read, and what would be too much to catch up with is counted instead. Files are bounded
by giving the blocks of their beginning back to the file system (a hole of zeros stays, so offsets
and the rank's descriptor go on being right); where the file system cannot do that, the file is
emptied.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

from everstep.agent.log import say
from everstep.agent.this_machine import ThisMachine
from everstep.events import OutputLines
from everstep.model import NO_GENERATION, Generation, Rank

KEPT_BYTES = 64 << 20
"""Of each rank's log of the running generation: at least this much of its end stays on disk."""
KEPT_OLD_BYTES = 1 << 20
"""The same for logs of earlier generations."""
KEPT_GENERATIONS = 20
"""Logs of older generations are removed."""
SENT_BYTES_MAX = 64 << 10
"""Read from one rank's log at a time, so at most 320 KB/s go to people."""
BEHIND_BYTES_MAX = 256 << 10
"""A reader further behind than this skips what lies between."""
_SLACK_BYTES = 8 << 20
"""Punch holes of at least this size, not of every line."""
_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01
_BLOCK = 4096


class Tail:
    """One rank's log from a position on."""

    def __init__(self, path: Path, offset: int) -> None:
        self.path = path
        self.offset = offset
        self._idle_at = -1

    def read(self, *, whole_lines: bool = True) -> tuple[bytes, int]:
        """New output, and the number of bytes that were skipped before it.

        A line that is not ended is held back once, in case its end is about to come.
        """
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self.offset:
                    self.offset = 0  # the file was emptied
                skipped = self._skip(size)
                file.seek(self.offset)
                new = file.read(SENT_BYTES_MAX)
        except OSError:
            return b"", 0
        ended = max(new.rfind(b"\n"), new.rfind(b"\r")) + 1
        if whole_lines and ended == 0 and len(new) < SENT_BYTES_MAX and size != self._idle_at:
            self._idle_at = size
            return b"", skipped
        text = new[:ended] if ended else new
        self.offset += len(text)
        return text, skipped

    def _skip(self, size: int) -> int:
        if size - self.offset <= BEHIND_BYTES_MAX:
            return 0
        skipped = size - SENT_BYTES_MAX - self.offset
        self.offset += skipped
        return skipped


class Output:
    """The logs of this machine's ranks, of one generation at a time."""

    def __init__(self, here: ThisMachine) -> None:
        self._here = here
        self._generation = NO_GENERATION
        self._tails: dict[Rank, Tail] = {}
        self._holes: dict[Path, int] = {}

    @property
    def shown(self) -> dict[Rank, int]:
        """How far each log was read."""
        return {rank: tail.offset for rank, tail in self._tails.items()}

    def follow(self, generation: Generation, ranks: list[Rank], shown: dict[Rank, int]) -> None:
        """Follow these ranks' logs, from where a former agent stopped reading."""
        log = self._here.paths.rank_log
        self._generation = generation
        self._tails = {rank: Tail(log(generation, rank), shown.get(rank, 0)) for rank in ranks}

    def read(self) -> list[OutputLines]:
        """What is new, of every rank, bounded."""
        read = [self._lines(rank, *tail.read()) for rank, tail in self._tails.items()]
        return [lines for lines in read if lines.text or lines.dropped_bytes]

    def rest_of(self, rank: Rank, generation: Generation) -> list[OutputLines]:
        """What a rank that has ended left unread, bounded like everything."""
        found: list[OutputLines] = []
        tail = self._tails.get(rank)
        while tail is not None and generation == self._generation:
            lines = self._lines(rank, *tail.read(whole_lines=False))
            if not lines.text and not lines.dropped_bytes:
                break
            found.append(lines)
        return found

    def bound(self) -> None:
        """Give disk space back. Called every few seconds, never in the middle of a restart."""
        for directory in self._here.paths.ranks.glob("*"):
            if not directory.name.isdigit():
                continue
            age = self._generation - int(directory.name)
            if age > KEPT_GENERATIONS:
                shutil.rmtree(directory, ignore_errors=True)
                continue
            for log in directory.glob("*.log"):
                self._bound(log, KEPT_BYTES if age <= 0 else KEPT_OLD_BYTES)

    def _bound(self, log: Path, kept_bytes: int) -> None:
        hole = self._holes.get(log, 0)
        try:
            wanted = (log.stat().st_size - kept_bytes) // _BLOCK * _BLOCK
            if wanted - hole >= _SLACK_BYTES:
                free_beginning(log, wanted)
                self._holes[log] = wanted
        except OSError as error:
            say(f"cannot bound the size of {log}: {error}")

    def _lines(self, rank: Rank, text: bytes, skipped: int) -> OutputLines:
        return OutputLines(
            machine=self._here.setup.machine,
            rank=rank,
            generation=self._generation,
            text=text.decode(errors="replace"),
            dropped_bytes=skipped,
        )


def free_beginning(log: Path, length: int) -> None:
    """Give the blocks of the first `length` bytes back, or empty the file where that cannot be."""
    fd = os.open(log, os.O_WRONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        done = libc.fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(length))
        if done != 0:
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)
