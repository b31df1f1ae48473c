"""`everstep status`, `incidents`, `why`, `token`: ask the controller, or the journal without it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from rich.console import RenderableType

from everstep.commands import jobs, offline, stories, tables
from everstep.commands.client import Away, Client, token_of
from everstep.commands.screen import console as terminal
from everstep.controller.gate import findings_token
from everstep.controller.views import StatusView
from everstep.files import FileUnreadable, read_json
from everstep.paths import Endpoint, JobPaths

_Answer = TypeVar("_Answer")


def status(job: JobPaths, *, json: bool) -> None:
    answer, live = ask(job, Client.status, offline.status)
    if json:
        print_json(answer)
        return
    console = terminal()
    console.print(_headline(job, answer, live=live), soft_wrap=True)
    console.print(tables.machines(answer))
    if answer.alerts:
        console.print(tables.alerts(answer))
    for line in tables.looking(answer):
        console.print(line, soft_wrap=True, markup=False)
    console.print(tables.account(answer.seconds, answer.ettr), soft_wrap=True)
    for line in (*tables.code(answer), *tables.evictions(answer.evictions)):
        console.print(line, soft_wrap=True, markup=False)
    console.print(tables.copies(answer), soft_wrap=True, markup=False)
    for line in (*tables.standbys(answer), *tables.layout(answer)):
        console.print(line, soft_wrap=True, markup=False)
    for note in answer.notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    console.print(f"logs and output: {job.root}", soft_wrap=True, markup=False)


def incidents(job: JobPaths, *, json: bool) -> None:
    answer, _ = ask(job, Client.incidents, offline.incidents)
    if json:
        print_json(answer)
        return
    nothing = "no incident so far"
    content: RenderableType = tables.incidents(answer) if answer.incidents else nothing
    console = terminal()
    console.print(content)
    if answer.evictions:
        console.print(tables.evicted(answer))
    for line in tables.evictions(answer.evicted):
        console.print(line, soft_wrap=True, markup=False)
    console.print(tables.account(answer.seconds, answer.ettr), soft_wrap=True)


def why(job: JobPaths, subject: str, *, json: bool) -> None:
    answer, _ = ask(
        job, lambda client: client.why(subject), lambda paths: offline.why(paths, subject)
    )
    if json:
        print_json(answer)
        return
    console = terminal()
    for line in stories.in_short(answer):
        console.print(line, soft_wrap=True, markup=False)
    if stories.in_short(answer):
        console.print("all of it:")
    console.print(stories.story(answer))


def token(job: JobPaths, *, findings: bool, json: bool) -> None:
    """The job's own, or the one for monitors; in JSON with the place where to use it."""
    own = token_of(job)
    shown = findings_token(own) if findings else own
    if not json:
        sys.stdout.write(shown + "\n")
        return
    try:
        url = read_json(job.endpoint, Endpoint).url
    except FileUnreadable:
        url = ""  # it is not known yet where the controller will listen
    print_json({"token": shown, "url": url})


def print_json(answer: Any) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode() + "\n")


def ask(
    job: JobPaths, live: Callable[[Client], _Answer], replayed: Callable[[JobPaths], _Answer]
) -> tuple[_Answer, bool]:
    """The answer, and whether a live controller gave it; it is replayed otherwise."""
    if jobs.result_of(job) is not None:
        return replayed(job), False  # its former port may be another job's by now
    try:
        with Client(job) as client:
            return live(client), True
    except Away:
        return replayed(job), False


def _headline(job: JobPaths, answer: StatusView, *, live: bool) -> str:
    if answer.outcome is not None:
        return f"job {answer.job} {answer.outcome.outcome}: {answer.outcome.why}"
    if live:
        return f"job {answer.job} (term {answer.term}): {tables.progress(answer)}"
    state = "its controller does not answer" if jobs.runs_here(job) else "nothing of it runs here"
    return f"job {answer.job}: {state}; by its journal: {tables.progress(answer)}"
