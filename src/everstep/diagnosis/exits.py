"""Exit codes, as launchers report them in many forms.

Used by logs.py: the lines are found by the marks of tables/marks.toml whose id begins with "exit.".
torchrun's tables spread one process over several lines.
"""

from __future__ import annotations

import re

from everstep.diagnosis.findings import Exit, Place, Speaker
from everstep.model import Rank, Seconds

_SIGNALS = range(1, 65)
_SHELL = 128
_WRAPPED = 256

_LOCAL = re.compile(
    r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\)"
)
_TABLE_RANK = re.compile(r"^\s*rank\s+: (?P<rank>\d+) \(local_rank: (?P<local>\d+)\)")
_TABLE_HOST = re.compile(r"^\s*host\s+: (?P<machine>\S+)")
_TABLE_CODE = re.compile(r"^\s*exitcode\s+: (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)")
_OTHERS = (
    re.compile(
        r"[Gg]lobal rank (?P<rank>\d+) \(PID (?P<pid>\d+)\) exited with code (?P<code>-?\d+)"
    ),
    re.compile(
        r"\brank (?P<rank>\d+) (?:exited|died|crashed|terminated) with "
        r"(?:exit code |code |signal )?(?P<code>-?\d+)"
    ),
    re.compile(r"[Rr]ank (?P<rank>\d+) crashed with exit code (?P<code>-?\d+)"),
    re.compile(r"exits with return code = (?P<code>-?\d+)"),
    re.compile(
        r"error: (?P<machine>[\w.-]+): tasks? (?P<task>[\d,-]+): "
        r"(?:Exited with exit code (?P<code>\d+)|(?P<word>\w[\w ]*))"
    ),
)
_WORDS = {
    "Killed": -9,
    "Terminated": -15,
    "Aborted": -6,
    "Segmentation fault": -11,
    "Bus error": -7,
    "Out Of Memory": -9,
    "Floating point exception": -8,
}


def normal(code: int) -> int:
    """An exit code as Python reports it: shells and containers add 128, some wrappers wrap."""
    if code > _SHELL and code - _SHELL in _SIGNALS:
        return _SHELL - code
    if _WRAPPED - code in _SIGNALS and code > _SHELL:
        return code - _WRAPPED
    return code


class Exits:
    """Collects the ends of processes from one text."""

    def __init__(self) -> None:
        self.found: list[Exit] = []
        self._rank: Rank | None = None
        self._local: int | None = None
        self._machine: str | None = None

    def take(
        self, rest: str, speaker: Speaker, place: Place, at: Seconds | None, attempt: int
    ) -> None:
        """One line that speaks of an end, or of who it is that ended."""
        if found := _TABLE_HOST.match(rest):
            self._machine = found["machine"]
        elif found := _TABLE_RANK.match(rest):
            self._rank, self._local = Rank(int(found["rank"])), int(found["local"])
        elif found := _TABLE_CODE.match(rest):
            ended = Speaker(
                rank=self._rank,
                local_rank=self._local,
                machine=self._machine,
                pid=int(found["pid"]),
            )
            self._add(int(found["code"]), ended, place, at, attempt)
            self._rank = self._local = self._machine = None
        elif found := _LOCAL.search(rest):
            ended = Speaker(
                local_rank=int(found["local"]), machine=speaker.machine, pid=int(found["pid"])
            )
            self._add(int(found["code"]), ended, place, at, attempt)
        else:
            self._take_other(rest, speaker, place, at, attempt)

    def _take_other(
        self, rest: str, speaker: Speaker, place: Place, at: Seconds | None, attempt: int
    ) -> None:
        for form in _OTHERS:
            found = form.search(rest)
            if found is None:
                continue
            groups = found.groupdict()
            code = groups["code"]
            number = (
                int(code) if code is not None else _WORDS.get((groups.get("word") or "").strip())
            )
            if number is None:
                continue
            rank, pid = groups.get("rank"), groups.get("pid")
            ended = Speaker(
                rank=Rank(int(rank)) if rank is not None else speaker.rank,
                machine=groups.get("machine") or speaker.machine,
                pid=int(pid) if pid is not None else None,
            )
            self._add(number, ended, place, at, attempt)
            return

    def _add(
        self, code: int, speaker: Speaker, place: Place, at: Seconds | None, attempt: int
    ) -> None:
        self.found.append(
            Exit(code=normal(code), speaker=speaker, place=place, at=at, attempt=attempt)
        )
