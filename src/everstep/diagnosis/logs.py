"""Reads one log, however long, and keeps what rules and marks find in it.

Used by investigation.py, and by the agent on lines as they come. Memory is bounded: of equal
findings of one speaker the first is kept and the others are counted.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from everstep.diagnosis.exits import Exits
from everstep.diagnosis.findings import Finding, Place, Speaker
from everstep.diagnosis.labels import repeated, section_of, speaker_of, speaker_of_file
from everstep.diagnosis.metrics import metric_scanner
from everstep.diagnosis.rules import Mark, Means, Pattern, Rule, Rules, patterns_of
from everstep.diagnosis.scanner import LINE_BYTES, Engine, Line, Scanner, fastest
from everstep.diagnosis.seen import Marked, Seen
from everstep.diagnosis.silence import Ledger
from everstep.diagnosis.stamps import stamp_of
from everstep.diagnosis.steps import progress_in
from everstep.diagnosis.tasks import Tasks
from everstep.diagnosis.text import clean, readable
from everstep.diagnosis.tracebacks import LOOK_BACK_LINES, Trace, trace_before
from everstep.diagnosis.who import Who
from everstep.diagnosis.words import Role
from everstep.model import Seconds, Value

TAIL_BYTES = 256 << 10
"""The end of a text is looked at for how far training came and for its last words."""
_LOOK_BACK_BYTES = 64 << 10
_LONGEST_LINE = 1 << 20
"""A line that goes on for longer is read in pieces."""
_BUSY_BYTES = 8 << 10
_BUSY_LINES = 6
"""Before the first line of a rank that waited."""
_NAMED_GROUPS = ("rank", "machine", "address")


class _Here(Value, frozen=True, kw_only=True):
    """A line that was found, and what is known of it."""

    shown: str
    rest: str
    """Without its labels."""
    speaker: Speaker
    place: Place
    at: Seconds | None


class People(NamedTuple):
    """What all logs of a job are read into together."""

    who: Who
    ledger: Ledger


class Patterns:
    """All rules, ready to be looked for; made once."""

    def __init__(self, rules: Rules, engine: Callable[[list[bytes]], Engine] | None = None) -> None:
        self.entries: list[Pattern] = patterns_of(rules)
        made_by = engine or fastest()
        self.scanner = Scanner([entry.regex for entry in self.entries], made_by)
        self.metrics = metric_scanner(made_by, [entry.match for entry in rules.metric])
        self.by_id = {rule.id: rule for rule in rules.rule}
        self.compiled = [re.compile(entry.regex) for entry in self.entries]
        self.unless = {
            entry.owner.id: [re.compile(regex) for regex in entry.owner.unless]
            for entry in self.entries
        }


class LogReader:
    """One log, piece by piece."""

    def __init__(
        self,
        file: str,
        patterns: Patterns,
        people: People,
        attempt: int = 0,
        listener: Callable[[bytes, int], None] | None = None,
    ) -> None:
        """`listener` gets every piece, too, in whole lines, with the number of the first one."""
        self._file = file
        self._ledger = people.ledger
        self._listener = listener
        self._patterns = patterns
        self._who = people.who
        self._attempt = attempt
        self._section = self._speaker_of_file(file)
        self._left = b""
        self._before = b""
        self._lines = 0
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._findings: dict[tuple[object, ...], Finding] = {}
        self._marks: list[Marked] = []
        self._new: list[Finding] = []
        self._exits = Exits()
        self._tasks = Tasks()
        self._tasks_at: _Here | None = None
        self._waited = False

    def feed(self, chunk: bytes) -> None:
        """The next piece, of any size."""
        text = self._left + chunk
        cut = text.rfind(b"\n") + 1
        if cut == 0:
            if len(text) < _LONGEST_LINE:
                self._left = text
                return
            cut = len(text)
        self._left = text[cut:]
        self._read(text[:cut])

    def new_findings(self) -> list[Finding]:
        """What was found since the last time: for whoever reads a log as it grows."""
        new, self._new = self._new, []
        return new

    def finish(self) -> Seen:
        """Everything that was found."""
        if self._left:
            self._read(self._left)
            self._left = b""
        text = b"".join(self._tail)
        tail = [clean(line) for line in re.split(rb"[\r\n]", text.removesuffix(b"\n"))]
        if not self._waited and self._section.rank is not None:
            for line in tail[-_BUSY_LINES:]:
                self._ledger.before(line)  # its last words, if the others wait for this rank
        first = self._lines - len(tail) + 1
        progress = progress_in(tail)
        return Seen(
            file=self._file,
            findings=(*self._findings.values(), *self._foreign_memory()),
            marks=tuple(self._marks),
            exits=tuple(self._exits.found),
            progress=tuple(first + number for number in progress.lines),
        )

    # --- one piece -------------------------------------------------------------------------------

    def _read(self, text: bytes) -> None:
        if self._listener is not None:
            self._listener(text, self._lines + 1)
        counted = at = 0
        for line in self._patterns.scanner.lines(text):
            counted += _breaks(text, at, line.start)
            at = line.start
            self._take(text, line, self._lines + counted + 1)
        self._lines += _breaks(text, 0, len(text)) + (not text.endswith(b"\n"))
        self._before = (self._before + text[-_LOOK_BACK_BYTES:])[-_LOOK_BACK_BYTES:]
        self._tail.append(text[-TAIL_BYTES:])
        self._tail_bytes += len(self._tail[-1])
        while self._tail_bytes - len(self._tail[0]) >= TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft())

    def _take(self, text: bytes, line: Line, number: int) -> None:
        raw = text[line.start : line.end]
        shown = clean(raw if len(raw) <= LINE_BYTES else raw[:LINE_BYTES])
        section = section_of(shown)
        if section is not None:
            self._section = self._speaker_of_file(section)
            return
        speaker, rest = self._speaker(shown)
        here = _Here(
            shown=shown,
            rest=rest,
            speaker=speaker,
            place=Place(file=self._file, line=number, text=readable(shown)),
            at=stamp_of(shown),
        )
        for pattern, regex in self._owners(line, shown):
            if isinstance(pattern.owner, Mark):
                self._mark(pattern.owner, here, text[: line.start])
            elif pattern.owner.role is not Role.NOISE:
                self._find(pattern.owner, regex, here, self._before_and(text, line.end))

    def _before_and(self, text: bytes, end: int) -> bytes:
        """What stands before this place, of the pieces before, too."""
        if end >= _LOOK_BACK_BYTES:
            return text[end - _LOOK_BACK_BYTES : end]
        return self._before[-(_LOOK_BACK_BYTES - end) :] + text[:end]

    def _mark(self, mark: Mark, here: _Here, before: bytes) -> None:
        if mark.means is Means.MACHINE:
            self._section = self._who.owner_named_in(here.shown) or self._section
            return
        if mark.means is Means.TASKS:
            self._tasks.take(here.shown)
            self._tasks_at = here
            return
        if mark.means is Means.WAITS:
            self._wait(here, before)
            return
        if mark.means is Means.RESTART and self._findings:
            self._attempt += 1
        if mark.means is Means.IDENTITY:
            self._who.learn(here.shown, here.speaker)
            self._who.learn_nodes(here.shown, self._attempt)
            return
        if mark.means is Means.EXIT:
            self._exits.take(here.rest, here.speaker, here.place, here.at, self._attempt)
            return
        self._marks.append(
            Marked(
                mark=mark.id,
                means=mark.means,
                place=here.place,
                speaker=here.speaker,
                at=here.at,
                attempt=self._attempt,
            )
        )

    def _wait(self, here: _Here, before: bytes) -> None:
        """A line of the ledger; what stood before the first one may say what was being done."""
        first = not self._waited
        took = self._ledger.line(here.shown, here.place, here.speaker, self._attempt)
        self._waited = self._waited or took
        if took and first:
            for line in before[-_BUSY_BYTES:].splitlines()[-_BUSY_LINES:]:
                self._ledger.before(clean(line))

    def _find(self, rule: Rule, regex: re.Pattern[str], here: _Here, text: bytes) -> None:
        """Keep what a rule found, or count it."""
        self._who.learn(here.shown, here.speaker)
        named = _named(regex, here.shown)
        key = (rule.id, here.speaker, named, self._attempt)
        times = repeated(here.shown)
        known = self._findings.get(key)
        if known is not None:
            self._findings[key] = msgspec.structs.replace(
                known, repeated=known.repeated + times, last_line=here.place.line
            )
            return
        trace, step = Trace(), None
        if rule.role is Role.ROOT:
            before = _lines_before(text)
            trace = trace_before(before, len(before) - 1)
            if "ignored" in trace.traits:
                return
            step = progress_in(before).last_step
        found = self._findings[key] = msgspec.structs.replace(
            rule.finding(here.place, here.speaker, self._attempt, here.at),
            repeated=times,
            traits=trace.traits,
            step=step,
            named=named,
        )
        self._new.append(found)

    def _foreign_memory(self) -> list[Finding]:
        """That a process which is not the job's held most of the memory, by the kernel's table."""
        rule = self._patterns.by_id.get("derived.foreign-memory")
        name, here = self._tasks.foreign, self._tasks_at
        if rule is None or name is None or here is None:
            return []
        found = rule.finding(here.place, here.speaker, self._attempt)
        return [msgspec.structs.replace(found, why=f"{rule.why}: {name}")]

    def _owners(self, line: Line, shown: str) -> list[tuple[Pattern, re.Pattern[str]]]:
        """The patterns that truly speak about this line, one of each rule; compiled, too."""
        found: dict[str, tuple[Pattern, re.Pattern[str]]] = {}
        for number in line.patterns:
            entry, regex = self._patterns.entries[number], self._patterns.compiled[number]
            if entry.owner.id in found or not regex.search(shown):
                continue
            if any(other.search(shown) for other in self._patterns.unless[entry.owner.id]):
                continue
            found[entry.owner.id] = (entry, regex)
        special = [pair for pair in found.values() if not _is_last_resort(pair[0].owner)]
        return special or list(found.values())

    def _speaker_of_file(self, name: str) -> Speaker:
        """By its name's own form, else by a machine of the site that stands in it."""
        found = speaker_of_file(name)
        owner = self._who.owner_named_in(name)
        if owner is None or (found.machine is not None and self._who.is_machine(found.machine)):
            return found
        return msgspec.structs.replace(found, machine=owner.machine)

    def _speaker(self, shown: str) -> tuple[Speaker, str]:
        """From the line's labels, else from the name of its file or section."""
        speaker, rest = speaker_of(shown)
        if speaker.rank is None and speaker.machine is None:
            speaker = msgspec.structs.replace(
                speaker, rank=self._section.rank, machine=self._section.machine
            )
        elif speaker.machine is None and self._section.rank in {None, speaker.rank}:
            speaker = msgspec.structs.replace(speaker, machine=self._section.machine)
        return speaker, rest


def _lines_before(text: bytes) -> list[str]:
    """The last line of the text and some before it, readable."""
    return [clean(line) for line in re.split(rb"[\r\n]+", text)[-LOOK_BACK_LINES:]]


def _named(pattern: re.Pattern[str], shown: str) -> tuple[str, ...]:
    """Whom the line names in the groups of its pattern, as "rank 3" or a machine's name."""
    found = pattern.search(shown)
    groups = found.groupdict() if found else {}
    names = []
    for group in _NAMED_GROUPS:
        value = groups.get(group)
        if value:
            names.append(f"rank {value}" if group == "rank" else value)
    return tuple(names)


def _is_last_resort(owner: Rule | Mark) -> bool:
    return isinstance(owner, Rule) and owner.last_resort


def _breaks(text: bytes, start: int, end: int) -> int:
    """How many lines end there; a carriage return ends one, too."""
    return text.count(b"\n", start, end) + text.count(b"\r", start, end)
