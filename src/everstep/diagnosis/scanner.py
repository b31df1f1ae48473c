"""Finds the few lines of a large text that any of many patterns speaks about.

Used by logs.py. hyperscan does it at the speed of memory; where it is not installed, re does the
same, slower. Patterns are of the part of regular expressions that both understand: no look-around,
no back-references. Named groups may stand in them; groups.search() reads them from a found line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

_GROUP = re.compile(r"\(\?P<\w+>")
_BREAK = re.compile(rb"[\r\n]")
LINE_BYTES = 16 << 10
"""A longer line is looked at as this many bytes around what was found, and its first ones."""

FORMS_MAX = 10_000
"""Forms of lines that Attentive remembers."""
SUSPICIOUS = re.compile(
    rb"abort|assert|bad|blocked|broken|BUG:|busy|cancel|cannot|can't|closed|corrupt|CUDA|cud|denied"
    rb"|died|down|ECC|EDAC|(?-i:E[A-Z]{3,})|error|evict|exceed|except|exit|expired|fail|fatal|fault"
    rb"|full|gone|GPU|hang|hung|illegal|indexed_dataset|interrupt|invalid|kill|leak|limit|link"
    rb"|lockup|lost|memmap|memory|miss|nan\b|NCCL|no |not |NODE|OOM|overflow|panic|preempt|quota"
    rb"|reach|read-?only|refus|reject|reset|retr|segfault|server|shm|signal|SIG|slow|space|stale"
    rb"|stall|status|stop|stuck|submitted|suspend|terminat|throttl|timed|timeout|trap|unable"
    rb"|pulled|undefined|unavailable|unexpected|unhealthy|unknown|unreach|warn|Xid|[^\x00-\x7f]",
    re.IGNORECASE,
)
"""Every line that any rule speaks about has one of these."""
_TIMES = re.compile(rb"\d\d:\d\d:\d\d[.,\d]*|\d+\.\d+|\d{4,}|0x[0-9a-f]+")

Report = Callable[[int, int], None]
"""Number of the pattern, and where its match ends."""


class Line(NamedTuple):
    """A line that patterns matched."""

    start: int
    end: int
    """Without its line break."""
    patterns: tuple[int, ...]
    """Their numbers, ascending."""


class Engine(Protocol):
    """Looks for all patterns at once."""

    def scan(self, text: bytes, report: Report) -> None: ...


class Scanner:
    """Many patterns, ready to be looked for."""

    def __init__(self, patterns: Sequence[str], engine: Callable[[list[bytes]], Engine]) -> None:
        self._engine = engine([_GROUP.sub("(?:", pattern).encode() for pattern in patterns])

    def lines(self, text: bytes) -> Iterator[Line]:
        """Lines with a match, in their order; carriage returns end lines, too."""
        hits: dict[int, set[int]] = {}

        def report(pattern: int, end: int) -> None:
            hits.setdefault(end, set()).add(pattern)

        self._engine.scan(text, report)
        start = end = -1
        found: set[int] = set()
        for at in sorted(hits):
            if at > end:
                if found:
                    yield Line(start, end, tuple(sorted(found)))
                start, end = _line_around(text, at)
                found = set()
            found |= hits[at]
        if found:
            yield Line(start, end, tuple(sorted(found)))


def _line_around(text: bytes, at: int) -> tuple[int, int]:
    """The line that the byte before `at` belongs to."""
    start = text.rfind(b"\n", 0, at - 1) + 1
    start = max(start, text.rfind(b"\r", start, at - 1) + 1)
    found = _BREAK.search(text, at)
    return start, found.start() if found else len(text)


class Hyperscan:
    """All patterns in one automaton."""

    def __init__(self, patterns: list[bytes]) -> None:
        import hyperscan  # noqa: PLC0415  # optional: fastest() asks before

        self._database = hyperscan.Database()
        self._database.compile(
            expressions=patterns,
            ids=list(range(len(patterns))),
            elements=len(patterns),
            flags=hyperscan.HS_FLAG_MULTILINE,
        )

    def scan(self, text: bytes, report: Report) -> None:
        def found(pattern: int, _start: int, end: int, _flags: int, _context: object) -> None:
            report(pattern, end)

        self._database.scan(text, match_event_handler=found)


class Alternatives:
    """One pattern after the other: for single lines, and where hyperscan is not installed."""

    def __init__(self, patterns: list[bytes]) -> None:
        self._patterns = [re.compile(pattern) for pattern in patterns]

    def scan(self, text: bytes, report: Report) -> None:
        for line in re.finditer(rb"[^\r\n]+", text):
            for number, pattern in enumerate(self._patterns):
                found = pattern.search(line[0])
                if found is not None:
                    report(number, line.start() + found.end())


class Attentive:
    """Looks closer at the few lines that are worth it: for agents, which read lines as they come.

    Needs nothing installed and no time to be made. A line without a suspicious word is passed by,
    and what was found for a line holds for all that differ in times and long numbers only, so a
    message that repeats for ever costs next to nothing.
    """

    def __init__(self, patterns: list[bytes]) -> None:
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._known: dict[bytes, tuple[int, ...]] = {}

    def scan(self, text: bytes, report: Report) -> None:
        for line in re.finditer(rb"[^\r\n]+", text):
            if SUSPICIOUS.search(line[0]) is not None:
                for number in self._found(line[0]):
                    report(number, line.end())

    def _found(self, line: bytes) -> tuple[int, ...]:
        form = _TIMES.sub(b"#", line)
        found = self._known.get(form)
        if found is None:
            found = tuple(
                number
                for number, pattern in enumerate(self._patterns)
                if pattern.search(line) is not None
            )
            if len(self._known) >= FORMS_MAX:
                self._known.clear()
            self._known[form] = found
        return found


def fastest() -> Callable[[list[bytes]], Engine]:
    """The engine to use here."""
    try:
        import hyperscan  # noqa: F401, PLC0415
    except ImportError:
        return Alternatives
    return Hyperscan
