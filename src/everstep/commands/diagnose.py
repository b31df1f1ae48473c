"""`everstep diagnose PATH...`: what broke, from the files of any failed job.

Reads files, directories, archives and standard input in pieces, so that a log of gigabytes needs
little memory, and hands them to diagnosis/. Needs no job, no controller and no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import msgspec
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from everstep.commands.dump_files import (
    PACKED,
    STDIN,
    UNREADABLE,
    Opened,
    files_of,
    why_unread,
)
from everstep.commands.screen import console
from everstep.commands.show import print_json
from everstep.diagnosis.answer import Answer
from everstep.diagnosis.findings import Finding, Site
from everstep.diagnosis.investigation import Investigation
from everstep.diagnosis.logs import Patterns
from everstep.diagnosis.progress import Pattern
from everstep.diagnosis.rules import Rules, parse, together
from everstep.diagnosis.tables import own_grades, own_rules
from everstep.model import UserError, Value

CHUNK_BYTES = 4 << 20
PACKED_TIMES = 10
"""How much larger a packed log is, roughly."""
_SLOW_BYTES = 64 << 20
"""More than this takes long enough for a person to want to see progress."""


class LayoutFile(Value, frozen=True, kw_only=True):
    """What a user knows of the job, as JSON; every key may be missing."""

    world_size: int | None = None
    machines: int | None = None
    ranks_per_machine: int | None = None
    hosts: tuple[str, ...] = ()
    """In the order of ranks."""


def diagnose(paths: Sequence[str], *, layout: Path | None, extra: Path | None, json: bool) -> None:
    """Print the answer."""
    rules = _rules(extra)
    inquiry = Investigation(rules, own_grades(), _site(layout), Patterns(rules))
    files = list(files_of(paths))
    if not files:
        raise UserError(f"There is no file in {', '.join(paths)}: name logs, dumps or a directory.")
    unread = _read_all(inquiry, files)
    if len(unread) == len(files):
        raise UserError(f"Nothing could be read: {'; '.join(unread)}.")
    answer = msgspec.structs.replace(inquiry.answer(), unread=tuple(unread))
    if json:
        print_json(answer)
    else:
        show(answer)


def _rules(extra: Path | None) -> Rules:
    if extra is None:
        return own_rules()
    of_site = parse(extra.read_text("utf-8"), str(extra))
    for entry in of_site.metric:
        try:
            Pattern.of(entry.match)
        except ValueError as error:
            raise UserError(f"{extra}: {error}.") from error
    return together((own_rules(), of_site))


def _site(layout: Path | None) -> Site:
    if layout is None:
        return Site()
    try:
        known = msgspec.json.decode(layout.read_bytes(), type=LayoutFile)
    except msgspec.MsgspecError as error:
        raise UserError(f"{layout} is no layout: {error}.") from error
    per_machine = known.ranks_per_machine
    if per_machine is None and known.world_size and known.machines:
        per_machine = known.world_size // known.machines
    return Site(world_size=known.world_size, ranks_per_machine=per_machine, hosts=known.hosts)


# --- reading -------------------------------------------------------------------------------------


def _read_all(inquiry: Investigation, files: Sequence[str]) -> list[str]:
    """Feed every file; those that cannot be read, with the reason."""
    unread = []
    with _progress(files) as progress:
        task = progress.add_task("reading", total=_total(files)) if progress else None
        for file in files:
            try:
                for size in _read(inquiry, file):
                    if progress is not None and task is not None:
                        progress.advance(task, size)
            except UNREADABLE as error:
                unread.append(why_unread(file, error))
    return unread


def _read(inquiry: Investigation, file: str) -> Iterator[int]:
    """Feed one file, piece by piece; how far it came in bytes on disk."""
    text = inquiry.open(file, _unpacked_bytes(file))
    with Opened(file) as (source, packed):
        before = 0
        while chunk := source.read(CHUNK_BYTES):
            text.feed(chunk)
            at = packed.tell() if packed is not None else before + len(chunk)
            yield at - before
            before = at
    inquiry.close(text)


def _unpacked_bytes(file: str) -> int | None:
    """The size of a text, as far as it is known before it is read."""
    if file == STDIN:
        return None
    size = Path(file).stat().st_size
    return size * PACKED_TIMES if Path(file).suffix in PACKED else size


def _total(files: Sequence[str]) -> int | None:
    if STDIN in files:
        return None
    return sum(Path(file).stat().st_size for file in files)


def _progress(files: Sequence[str]) -> AbstractContextManager[Progress | None]:
    total = _total(files)
    if not sys.stderr.isatty() or (total is not None and total < _SLOW_BYTES):
        return nullcontext()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console(stderr=True), transient=True)


# --- for people ----------------------------------------------------------------------------------


def show(answer: Answer) -> None:
    """The answer as a table, with the lines that led to it."""
    screen = console()
    table = Table(box=None, show_header=False)
    table.add_row("what", Text(answer.category.replace("_", " "), style="bold"))
    table.add_row("cause", answer.root_class.replace("_", " "))
    table.add_row("do first", Text(answer.first_action.replace("_", " "), style="bold"))
    table.add_row("accused", _accused(answer))
    table.add_row("sure", f"{answer.confidence:.0%}")
    table.add_row("why", answer.why)
    for text in answer.would_change:
        table.add_row("would change it", text)
    for text in answer.unread:
        table.add_row("not read", text)
    screen.print(table)
    for finding in answer.evidence:
        screen.print(_evidence(finding), soft_wrap=True)


def _accused(answer: Answer) -> str:
    ranks = ", ".join(f"rank {rank}" for rank in answer.accused_ranks)
    return ", ".join(filter(None, (*answer.accused_machines, ranks))) or "nobody"


def _evidence(finding: Finding) -> Text:
    """Where a line stands, what it is, and the line."""
    place = finding.place
    where = f"{place.file}:{place.line}" if place is not None else "several texts"
    head = Text(f"{where}  {finding.rule}, {finding.role}", style="dim")
    if finding.repeated > 1:
        head.append(f", {finding.repeated} times")
    return head.append(f"\n  {place.text if place is not None else finding.why}", style="default")
