"""`everstep versions`: which code a job ran, since when, from whom, and what became of it."""

from __future__ import annotations

import time

from rich.table import Table
from rich.text import Text

from everstep.commands import offline, tables
from everstep.commands.client import Client
from everstep.commands.screen import console as terminal
from everstep.commands.show import ask, print_json
from everstep.controller.version_views import VersionsView, VersionView
from everstep.paths import JobPaths

FILES_SHOWN = 3


def versions(job: JobPaths, *, json: bool) -> None:
    """Ask the controller, or the journal without it."""
    answer, _ = ask(job, Client.versions, offline.versions)
    if json:
        print_json(answer)
        return
    console = terminal()
    if not answer.versions:
        why = answer.why_none or "nothing is known of it yet"
        console.print(f"the code of job {answer.job} is not versioned: {why}", soft_wrap=True)
        return
    console.print(table(answer))
    for view in answer.versions:
        for line in remarks(view):
            console.print(Text(line), soft_wrap=True)


def table(view: VersionsView) -> Table:
    """One row for each, the oldest first."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("v", "condition", "who", "when", "source", "files changed", "ran", "note"):
        made.add_column(column, overflow="fold")
    for each in view.versions:
        condition = f"{each.condition} *" if each.name == view.running else str(each.condition)
        texts = (
            each.name,
            condition,
            each.by,
            when(each.at),
            each.source,
            _changed(each),
            _ran(each),
            each.note,
        )
        made.add_row(*map(Text, texts))
    return made


def remarks(view: VersionView) -> list[str]:
    """What else is worth saying of it, one line each."""
    found = [f"{view.condition}: {view.failure or view.why}"] if view.why else []
    found += [view.repeats, *(f"requires: {name} changed" for name in view.requirements)]
    if view.elsewhere:
        found.append(f"not versioned, since it lies elsewhere: {', '.join(view.elsewhere)}")
    return [f"{view.name}: {line}" for line in found if line]


def when(moment: float) -> str:
    """A point in time, in the time zone of who reads it."""
    return time.strftime("%d %b %H:%M:%S", time.localtime(moment))


def _changed(view: VersionView) -> str:
    if not view.base:
        return f"{view.files} files" if view.files else ""
    named = ", ".join(view.changed[:FILES_SHOWN])
    more = len(view.changed) - FILES_SHOWN
    many = f" and {more}{'+' if len(view.changed) >= 100 else ''} more" if more > 0 else ""
    return f"{named}{many} (of {view.base})"


def _ran(view: VersionView) -> str:
    return f"{tables.age(view.ran_s)}, {view.ran_steps} steps" if view.runs else ""
