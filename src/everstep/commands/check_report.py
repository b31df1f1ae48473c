"""What `everstep check` says: one line for monitors, a table for people, all of it as JSON.

Pure: results in, text out. The exit codes are those of Nagios plugins, which Slurm's
HealthCheckProgram and most other monitors can use as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
from rich.table import Table
from rich.text import Text

from everstep.agent.checks.check import Limits
from everstep.commands.check_choice import Listed
from everstep.commands.plugin import Status
from everstep.diagnosis.words import Verdict
from everstep.health import Result
from everstep.model import Seconds, Value

_SEVERE = (Verdict.EVICT, Verdict.SUSPECT, Verdict.WARN, Verdict.JOB, Verdict.USER, Verdict.ERROR)
_COLOURS = {Verdict.EVICT: "bold red", Verdict.SUSPECT: "yellow", Verdict.WARN: "yellow"}
_WORDS = {Verdict.INFO: "pass", Verdict.ERROR: "could not run"}
_COMMON = frozenset(field.name for field in msgspec.structs.fields(Limits))
"""Limits that every check has: once below the list is enough."""
NAMED = 3
"""Different failures that the first line names; the table has all."""


class Absent(Value, frozen=True, kw_only=True):
    """A signal that this machine does not have, which is neither good nor bad."""

    checks: tuple[str, ...]
    why: str


class Unseen(Value, frozen=True, kw_only=True):
    """What this user may not look at."""

    checks: tuple[str, ...]
    why: str
    do: str


class Report(Value, frozen=True, kw_only=True):
    """All that one call found; --json prints it."""

    status: str
    """OK, WARNING, CRITICAL or UNKNOWN."""
    exit_code: int
    summary: str
    """The first line."""
    results: tuple[Result, ...]
    """The worst first."""
    absent: tuple[Absent, ...]
    unseen: tuple[Unseen, ...]
    silent: tuple[str, ...] = ()
    """Checks that ran and had nothing to look at: no rank runs, no directory is needed."""
    notes: tuple[str, ...] = ()
    """Of the call itself: a state that could not be kept, a node that was drained."""
    seconds: Seconds = 0.0


def report(
    results: Iterable[Result],
    absent: Sequence[Absent] = (),
    unseen: Sequence[Unseen] = (),
    silent: Sequence[str] = (),
) -> Report:
    ordered = sorted(results, key=_rank)
    status = _status(ordered, absent, unseen)
    return Report(
        status=status.name,
        exit_code=int(status),
        summary=_summary(status, ordered, absent, unseen),
        results=tuple(ordered),
        absent=tuple(absent),
        unseen=tuple(unseen),
        silent=tuple(silent),
    )


def worst(told: Report) -> str:
    """Why the machine should get no work, as a clause; for the reason of a drain."""
    evicting = [each for each in told.results if each.verdict is Verdict.EVICT]
    return "; ".join(map(_short, _alike(evicting)[:NAMED]))


class Alike(NamedTuple):
    """Results that say the same: one row, one clause."""

    result: Result
    """The first of them."""
    checks: tuple[str, ...]
    items: tuple[str, ...]

    @property
    def who(self) -> str:
        """Check and item."""
        between = ", " if len(self.checks) > 1 else " "
        return between.join(filter(None, map(_and_more, (self.checks, self.items))))


def _alike(results: Iterable[Result]) -> list[Alike]:
    """In the order of their first.

    Eight GPUs of one machine mostly fail for one reason. What cannot be read fails many checks.
    """
    groups: dict[tuple[str, ...], list[Result]] = {}
    for each in results:
        check = "" if each.verdict is Verdict.ERROR else each.check
        groups.setdefault((check, each.verdict, each.why, each.do), []).append(each)
    return [
        Alike(
            group[0],
            tuple(dict.fromkeys(each.check for each in group)),
            tuple(dict.fromkeys(each.item for each in group if each.item)),
        )
        for group in groups.values()
    ]


def _and_more(names: Sequence[str]) -> str:
    if not names:
        return ""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def tables(told: Report, *, everything: bool) -> Iterator[Table]:
    """What needs somebody, with what to do; if asked for, every item that passed."""
    others = [each for each in told.results if each.verdict is not Verdict.INFO]
    if others:
        yield _table(_alike(others), "why, and what to do")
    passed = [each for each in told.results if each.verdict is Verdict.INFO]
    if passed and everything:
        yield _table([Alike(each, (each.check,), (each.item,)) for each in passed], "why")


def _table(rows: Iterable[Alike], why: str) -> Table:
    """Three columns, so that sentences stay readable on 80."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    made.add_column("verdict", no_wrap=True)
    for column in ("check", why):
        made.add_column(column, overflow="fold")
    for row in rows:
        each = row.result
        verdict = Text(_WORDS.get(each.verdict, each.verdict), _COLOURS.get(each.verdict, ""))
        made.add_row(verdict, Text(row.who), Text("\n".join(filter(None, (each.why, each.do)))))
    return made


def list_table(checks: Iterable[Listed]) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("check", "what it finds, and from where", "every", "limits"):
        made.add_column(column, overflow="fold")
    for each in checks:
        own = {name: value for name, value in each.limits.items() if name not in _COMMON}
        limits = ", ".join(f"{name}={value!r}" for name, value in own.items())
        every = f"{each.every_s:g} s" if each.every_s else "at once"
        made.add_row(each.check, Text(each.about), every, Text(limits))
    return made


def lines(told: Report, *, everything: bool) -> list[str]:
    """What stands below the tables."""
    said = []
    if not everything and any(each.verdict is Verdict.INFO for each in told.results):
        said.append("--all shows what passed as well")
    if told.absent:
        count = sum(len(each.checks) for each in told.absent)
        reasons = "; ".join(f"{each.why} ({_counted(each.checks)})" for each in told.absent)
        said.append(f"absent here: {count}: {reasons}")
    if told.silent and everything:
        said.append(f"nothing to look at: {_names(told.silent)}")
    said += [
        f"what this user cannot see: {_names(each.checks)}: {each.why}. {each.do}".rstrip()
        for each in told.unseen
    ]
    return said + [f"note: {note}" for note in told.notes]


def _rank(result: Result) -> tuple[int, str, str]:
    place = _SEVERE.index(result.verdict) if result.verdict in _SEVERE else len(_SEVERE)
    return place, *result.key


def _status(
    results: Sequence[Result], absent: Sequence[Absent], unseen: Sequence[Unseen]
) -> Status:
    verdicts = {each.verdict for each in results}
    if Verdict.EVICT in verdicts:
        return Status.CRITICAL
    if any(each.failed for each in results):
        return Status.WARNING
    if Verdict.ERROR in verdicts or (not results and (unseen or not absent)):
        return Status.UNKNOWN
    return Status.OK


def _summary(
    status: Status, results: Sequence[Result], absent: Sequence[Absent], unseen: Sequence[Unseen]
) -> str:
    failed = [each for each in results if each.failed]
    worst_of: dict[str, Verdict] = {}
    for each in results:  # the worst comes first
        worst_of.setdefault(each.check, each.verdict)
    verdicts = list(worst_of.values())
    passed, broken = verdicts.count(Verdict.INFO), verdicts.count(Verdict.ERROR)
    counts = {
        "passed": passed,
        "failed": len(verdicts) - passed - broken,
        "could not run": broken,
        "not allowed": sum(len(each.checks) for each in unseen),
        "absent": sum(len(each.checks) for each in absent),
    }
    said = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    groups = _alike(failed)
    named = "; ".join(map(_short, groups[:NAMED]))
    if len(groups) > NAMED:
        named += "; ..."
    first = said.replace(" passed", _checks(passed), 1) or "nothing to check"
    return f"EVERSTEP {status.name} - " + (f"{named}; {first}" if named else first)


def _checks(count: int) -> str:
    return " check passed" if count == 1 else " checks passed"


def _short(said: Alike) -> str:
    """For the first line; `|` would begin the performance data of a Nagios plugin."""
    return f"{said.who}: {' '.join(said.result.why.split())}".replace("|", "/")


def _names(checks: Sequence[str]) -> str:
    return ", ".join(sorted(checks))


def _counted(checks: Sequence[str]) -> str:
    """As _names, with topics that are missing as a whole, or nearly so, in one word."""
    topics: dict[str, list[str]] = {}
    for name in sorted(checks):
        topics.setdefault(name.partition(".")[0], []).append(name)
    return ", ".join(
        f"{len(names)} of {topic}" if len(names) > NAMED else ", ".join(names)
        for topic, names in topics.items()
    )
