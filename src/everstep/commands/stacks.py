"""`everstep stacks`: what all ranks of a job do now, or what dumps of any job show.

A word that is a path means dumps, any other a job. Of a running job it asks the controller for a
look and waits until it is judged; nothing is stopped for it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import NamedTuple

from everstep.commands import jobs, offline, stack_tables
from everstep.commands.client import Away, Client
from everstep.commands.dump_files import STDIN
from everstep.commands.screen import console as terminal
from everstep.commands.show import ask, print_json
from everstep.commands.stack_tables import Wanted
from everstep.commands.update import who
from everstep.controller.look_views import LookView, StacksView, UnderWay
from everstep.model import EverstepError, UserError
from everstep.paths import JobPaths

POLL_S = 0.2
NO_NEWS_S = 90.0
"""Without an answer more of any machine for so long, it is given up: a look may take 30 s, and as
long again for its texts."""


class NoLook(EverstepError):
    """There is none to show."""


class Shown(NamedTuple):
    """How it is shown."""

    wanted: Wanted
    json: bool


def dumps_of(words: list[str], job: str | None) -> bool:
    """Whether these words are dumps and no job. Raises UserError if they are neither."""
    paths = [word for word in words if word == STDIN or Path(word).exists()]
    if job is not None:
        if words:
            raise UserError("Name a job with --job, or give dumps, not both.")
        return False
    others = [word for word in words if word not in paths]
    if paths and not others:
        return True
    if len(others) == len(words) <= 1 and not any("/" in word for word in others):
        return False
    raise UserError(f"There is no {', no '.join(others)}: give files or directories with dumps.")


def of_dumps(paths: list[str], layout: str | None, per_machine: int | None, how: Shown) -> None:
    """Show what is in these files."""
    from everstep.commands import stack_dumps  # noqa: PLC0415 -- reading dumps is slow to import

    asked = stack_dumps.Asked(layout=layout, ranks_per_machine=per_machine)
    view = stack_dumps.look_of_dumps(paths, asked)
    _show(view, f"{view.why}", how)


def of_job(job: JobPaths, *, last: bool, how: Shown) -> None:
    """Take a look at all ranks of the job, or show the newest one."""
    view = _newest(job) if last else _fresh(job, how)
    _show(view, f"job {job.root.name}, {_headline(view)}", how)


def _show(view: LookView, headline: str, how: Shown) -> None:
    if how.json:
        print_json(view)
        return
    console = terminal()
    console.print(headline, soft_wrap=True, markup=False)
    for part in stack_tables.look(view, how.wanted):
        console.print(part, soft_wrap=True)


def _headline(view: LookView) -> str:
    when = time.strftime("%d %b %H:%M:%S", time.localtime(view.asked_at))
    return f"look {view.number}, {when}: {view.why}"


# --- of a job ------------------------------------------------------------------------------------


def _newest(job: JobPaths) -> LookView:
    answer, _ = ask(job, Client.stacks, offline.stacks)
    if answer.newest is None:
        raise NoLook(
            f"Nobody has looked at the stacks of job {job.root.name} so far: leave out --last to"
            " look at them now."
        )
    return answer.newest


def _fresh(job: JobPaths, how: Shown) -> LookView:
    result = jobs.result_of(job)
    if result is not None:
        raise UserError(
            f"Job {job.root.name} is over ({result.outcome}: {result.why}): --last shows the newest"
            " look that was taken while it ran."
        )
    with Client(job) as client:
        after = client.ask_look(who())
        return _wait(client, after, how)


def _wait(client: Client, after: int, how: Shown) -> LookView:
    """Until the look is judged; a controller that dies meanwhile comes back and goes on with it."""
    told, news_at = "", time.monotonic()
    while True:
        answer = _asked(client, after)
        if answer is not None and answer.newest is not None:
            return answer.newest
        line = _progress(answer)
        if line != told:
            told, news_at = line, time.monotonic()
            if not how.json:
                sys.stderr.write(f"everstep: {line}\n")
        if time.monotonic() - news_at > NO_NEWS_S:
            raise NoLook(
                f"The look is not finished, and nothing is new for {NO_NEWS_S:.0f} s ({told}):"
                " `everstep stacks --last` shows it when it is."
            )
        time.sleep(POLL_S)


def _asked(client: Client, after: int) -> StacksView | None:
    """None: the controller is away for now."""
    try:
        return client.stacks(after)
    except Away:
        if jobs.result_of(client.job) is not None or not client.job.root.exists():
            raise
        return None


def _progress(answer: StacksView | None) -> str:
    if answer is None:
        return "the controller does not answer: waiting for it"
    going: UnderWay | None = answer.under_way
    if going is None:
        return "waiting for the look to begin"
    counted = stack_tables.progress(going.answered, going.asked, going.fetching)
    return f"look {going.number}: {counted}"
