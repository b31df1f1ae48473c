"""Takes the texts of one failed job, one after the other, and answers.

Called by `everstep diagnose` with files, and by tests. Each text is read once, in pieces; a small
one is also kept whole, in case it is a dump (dumps.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from everstep.diagnosis.answer import Answer
from everstep.diagnosis.causes import Course
from everstep.diagnosis.dumps import Dumps
from everstep.diagnosis.findings import Exit, Finding, Site
from everstep.diagnosis.history import told_apart
from everstep.diagnosis.judge import Facts, judge
from everstep.diagnosis.logs import LogReader, Patterns, People
from everstep.diagnosis.metrics import MetricLines
from everstep.diagnosis.progress import Pattern
from everstep.diagnosis.rules import Means, Rules
from everstep.diagnosis.seen import Marked, Seen
from everstep.diagnosis.series import Collector
from everstep.diagnosis.silence import Ledger
from everstep.diagnosis.who import Who
from everstep.diagnosis.words import Grade, Role

_ATTEMPT = re.compile(r"(?:attempt|try|run|restart)[_-]?(\d+)", re.IGNORECASE)
DUMP_BYTES = 32 << 20
"""No dump of one process or one machine is larger than this."""
_NO_LOG = frozenset({b"[", b"{", b"\x80"})
"""How JSON and pickles begin: a dump in these forms is no log besides."""
_OF_MACHINES = frozenset({Grade.HOST, Grade.HARDWARE, Grade.DEVICE, Grade.NETWORK})


class Text:
    """One input, piece by piece."""

    def __init__(self, file: str, reader: LogReader, metrics: MetricLines) -> None:
        self.file = file
        self._reader = reader
        self._metrics = metrics
        self._whole: bytearray | None = bytearray()

    def feed(self, chunk: bytes) -> None:
        """The next piece, of any size."""
        if self._whole is not None:
            self._whole += chunk
            if len(self._whole) > DUMP_BYTES:
                self._whole = None
        self._reader.feed(chunk)

    def finish(self) -> tuple[Seen, bytes]:
        """What it told as a log, and all of it if it is small enough to be a dump."""
        seen = self._reader.finish()
        self._metrics.finish()
        return seen, bytes(self._whole or b"")


class Investigation:
    """Everything that is known of one failure."""

    def __init__(
        self, rules: Rules, grades: Mapping[Grade, int], site: Site, patterns: Patterns
    ) -> None:
        self._rules = {rule.id: rule for rule in rules.rule}
        self._grades = grades
        self._site = site
        self._patterns = patterns
        self._people = People(Who(site), Ledger())
        self._seen: list[Seen] = []
        self._collector = Collector([Pattern.of(entry.match) for entry in rules.metric])
        self._dumps = Dumps()

    def open(self, file: str, size_bytes: int | None = None) -> Text:
        """A text that is to be fed, and its size if known; close() takes what it told."""
        attempt = _attempt_of(file)
        metrics = MetricLines(file, self._collector, self._patterns.metrics, attempt, size_bytes)
        reader = LogReader(file, self._patterns, self._people, attempt, metrics.piece)
        return Text(file, reader, metrics)

    def close(self, text: Text) -> None:
        """Take what a text told."""
        seen, whole = text.finish()
        attempt = _attempt_of(text.file)
        taken = bool(whole) and self._dumps.take(text.file, whole, attempt)
        if not (taken and whole.lstrip()[:1] in _NO_LOG):
            self._seen.append(seen)

    def answer(self) -> Answer:
        """The judgement over all texts."""
        texts = told_apart(self._seen)
        findings = [finding for seen in texts for finding in seen.findings]
        findings += self._collector.findings(self._site)
        findings += self._dumps.findings(self._site)
        findings += self._people.ledger.findings(self._site)
        marks = [mark for seen in texts for mark in seen.marks]
        exits = [ended for seen in texts for ended in seen.exits]
        facts = Facts(
            findings=tuple(findings),
            marks=tuple(marks),
            exits=tuple(exits),
            course=self._course(findings, marks, exits),
        )
        return judge(facts, self._rules, self._grades, self._people.who)

    def _course(
        self, findings: Sequence[Finding], marks: list[Marked], exits: Sequence[Exit]
    ) -> Course:
        machines = {finding.speaker.machine for finding in findings} - {None}
        site, who = self._site, self._people.who
        last = max((end.attempt for end in exits), default=0)
        ends = [end for end in exits if end.bad and end.attempt == last]
        if site.hosts:
            count = len(site.hosts)
        elif site.world_size and site.ranks_per_machine:
            count = site.world_size // site.ranks_per_machine
        else:
            count = len(machines)
        return Course(
            site=site,
            fresh_code=any(mark.means is Means.FRESH_CODE for mark in marks),
            progress={seen.file: seen.progress for seen in self._seen},
            machines=count,
            failed_ranks=frozenset(
                rank for end in ends if (rank := who.rank(end.speaker)) is not None
            ),
            failed_machines=frozenset(
                name for end in ends if (name := who.machine(end.speaker)) is not None
            ),
            failed_attempts=tuple(
                sorted(
                    {f.attempt for f in findings if f.grade in _OF_MACHINES and f.role is Role.ROOT}
                )
            ),
        )


def _attempt_of(file: str) -> int:
    """Which run a file is of, if its name says so."""
    found = _ATTEMPT.search(file.rsplit("/", 1)[-1])
    return int(found[1]) if found else 0
