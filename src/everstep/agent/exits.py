"""How a rank ended: the status its keeper noted, what it said, and the end of its output.

Used by agent/watch.py when a rank's process is gone. Reads only.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from everstep.model import ExitStatus, RankError
from everstep.processes import Process

TRACEBACK_MAX = 16 << 10
"""Characters of a traceback that travel; the innermost part is kept."""
LAST_LINES_MAX = 4 << 10
"""Bytes of a dead rank's output that travel."""


class Exits:
    """The keeper's file of exits, read on as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._known: dict[Process, ExitStatus] = {}

    def of(self, process: Process) -> ExitStatus | None:
        """How it ended; None if the keeper has not noted it (yet)."""
        if process not in self._known:
            self._read_on()
        return self._known.get(process)

    def _read_on(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                pid, ticks, status = (int(word) for word in line.split())
            except ValueError:
                continue  # a disk that was full for a moment cut this line off
            self._known[Process(pid, ticks)] = _decode(status)


def _decode(status: int) -> ExitStatus:
    code = os.waitstatus_to_exitcode(status)
    return ExitStatus(code=code) if code >= 0 else ExitStatus(signal=-code)


class _Extra(msgspec.Struct):
    py_callstack: str = ""


class _Message(msgspec.Struct):
    message: str
    extraInfo: _Extra = msgspec.field(default_factory=_Extra)  # noqa: N815 -- torch's name


class _ErrorFile(msgspec.Struct):
    message: _Message | str
    """A string where torch's C++ code wrote it."""


def read_error(path: Path) -> RankError | None:
    """Torch's error file, as @record or the launcher wrote it; None if there is no whole one."""
    try:
        said = msgspec.json.decode(path.read_bytes(), type=_ErrorFile).message
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if isinstance(said, str):
        return RankError(kind="", message=said, traceback="")
    kind, colon, message = said.message.partition(": ")
    if not colon or not kind.isidentifier():
        kind, message = "", said.message
    return RankError(
        kind=kind, message=message, traceback=said.extraInfo.py_callstack[-TRACEBACK_MAX:]
    )


def last_lines(log: Path) -> str:
    """The end of the rank's output, whole lines if there are any, at most LAST_LINES_MAX bytes."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LAST_LINES_MAX))
            end = file.read(LAST_LINES_MAX)
    except OSError:
        return ""
    if size > LAST_LINES_MAX and b"\n" in end[:-1]:
        end = end[end.index(b"\n") + 1 :]
    return end.decode(errors="replace")
