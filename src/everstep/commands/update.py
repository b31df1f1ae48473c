"""`everstep update` and `everstep rollback`: other code for a job that runs.

The code is sent to the controller, which decides what becomes of it; then follow.py tells how it
gets to the machines and into training, until it runs.
"""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from everstep.code.manifest import version_of
from everstep.code.store import CodeStore
from everstep.commands import jobs
from everstep.commands.client import Client
from everstep.commands.follow import Ending, Follower, Tell, say, silent
from everstep.commands.new_code import Sought, Source, find
from everstep.commands.presses import Interrupted, Presses, hangup_unwinds
from everstep.commands.show import print_json
from everstep.commands.source import apart
from everstep.controller.accepting import Asked
from everstep.controller.code import Accepted, RollBack, RollsBack
from everstep.controller.version_views import VersionsView, VersionView
from everstep.model import Seconds, UserError, Value, VersionId
from everstep.paths import JobPaths

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
IN_LINE = 8
"""Files that are named in one line."""
PROGRESS_BYTES = 16 << 20
"""Between two lines that say how much was sent."""


class Wanted(Value, frozen=True, kw_only=True):
    """The flags of `everstep update`."""

    what: str
    others: tuple[str, ...] = ()
    lazy: bool = False
    within: str | None = None
    note: str = ""
    overlap: int = 0
    exact: bool = False
    again: bool = False
    untried: bool = False
    dry_run: bool = False
    wait: bool = True
    json: bool = False


class UpdateAnswer(Value, frozen=True, kw_only=True):
    """What `update --json` and `rollback --json` print."""

    accepted: Accepted | RollsBack
    version: VersionView | None = None
    """What became of it; None if nobody waited."""


def update(job: JobPaths, wanted: Wanted) -> int:
    """Send code, and follow it until it runs or waits; returns the exit code."""
    within_s = _within(wanted)
    _check_running(job)
    with Client(job) as client, Presses() as presses:
        known = client.versions()
        if known.why_none or not known.roots:
            why = known.why_none or "the job does not say where it lies"
            raise UserError(f"The code of job {known.job} is not versioned: {why}.")
        source = find(_sought(job, wanted, known))
        asked = _asked(source, wanted, within_s)
        if wanted.dry_run:
            return _show_plan(client.update(asked), json=wanted.json)
        tell = silent if wanted.json else say
        for remark in source.snapshot.remarks:
            tell(remark)
        before = client.status().generation
        version = _send(client, source, presses, tell)
        _go_on(presses)
        accepted = client.update(replace(asked, version=version))
        _tell_accepted(accepted, tell)
        ending = Ending(0, None)
        if wanted.wait:
            follower = Follower(client, presses, tell)
            ending = follower.follow(accepted.version, before, lazy=wanted.lazy)
        if wanted.json:
            print_json(UpdateAnswer(accepted=accepted, version=ending.version))
        return ending.exit_code


def rollback(job: JobPaths, asked: RollBack, *, json: bool) -> int:
    """Bring an earlier version back, and follow that."""
    _check_running(job)
    with Client(job) as client, Presses() as presses:
        before = client.status().generation
        answer = client.rollback(asked)
        tell = silent if json else say
        verb = "would take" if asked.dry_run else "takes"
        tell(f"{answer.name} {verb} the place of {answer.running}")
        ending = Ending(0, None)
        if not asked.dry_run:
            follower = Follower(client, presses, tell, known=True)
            ending = follower.follow(answer.version, before, lazy=False)
        if json:
            print_json(UpdateAnswer(accepted=answer, version=ending.version))
        return ending.exit_code


def who() -> str:
    """The user, as the journal is to name them."""
    with suppress(OSError, KeyError):
        return getpass.getuser()
    return str(os.getuid())


def _check_running(job: JobPaths) -> None:
    result = jobs.result_of(job)
    if result is not None:
        raise UserError(f"Job {job.root.name} is over ({result.outcome}: {result.why}).")


def _within(wanted: Wanted) -> Seconds | None:
    """None: as the job's policy says."""
    if wanted.within is None:
        return None
    if not wanted.lazy:
        raise UserError("--within is for --lazy: an urgent update is put in place at once.")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", wanted.within)
    if match is None:
        raise UserError(f"--within {wanted.within} is no time: write 90s, 30m, 24h or 2d.")
    return float(match[1]) * _UNITS_S[match[2]]


def _sought(job: JobPaths, wanted: Wanted, known: VersionsView) -> Sought:
    return Sought(
        what=wanted.what,
        others=wanted.others,
        roots=known.roots,
        apart=apart(jobs.spec_of(job), job.root.parent),
        commits=[view.origin.commit for view in known.versions],
    )


def _asked(source: Source, wanted: Wanted, within_s: Seconds | None) -> Asked:
    manifest = source.snapshot.manifest
    return Asked(
        version=version_of(manifest),
        given=source.given,
        source=source.text,
        origin=source.origin,
        ancestors=source.ancestors,
        by=who(),
        note=wanted.note,
        urgent=not wanted.lazy,
        within_s=within_s,
        overlap=wanted.overlap,
        exact=wanted.exact,
        again=wanted.again,
        untried=wanted.untried,
        dry_run=wanted.dry_run,
        manifest=manifest if wanted.dry_run else None,
    )


def _go_on(presses: Presses) -> None:
    """Until the update is asked for, Ctrl-C takes it back."""
    if presses.count:
        raise Interrupted("Ctrl-C before the update was asked for: nothing was changed.")


def _send(client: Client, source: Source, presses: Presses, tell: Tell) -> VersionId:
    """Bring it to the controller, unless that has it; returns the id of what was sent.

    Of the copy that is made for it, since files may have changed since they were looked at.
    """
    manifest = source.snapshot.manifest
    version = version_of(manifest)
    files = f"{_count(manifest.files)}, {size(manifest.size_bytes)}"
    if client.manifest(version) is not None:
        tell(f"{files}; the controller has them already")
        return version
    with hangup_unwinds(), tempfile.TemporaryDirectory(prefix="everstep-update-") as beside:
        store = CodeStore(Path(beside) / "code")
        version = store.add(source.snapshot)
        archive = store.size_of_archive(version)
        parts = _told(store.chunks(version), archive, tell)
        client.send_code(version, archive, _unless_pressed(parts, presses))
    tell(f"{files}, sent to the controller")
    return version


def _unless_pressed(parts: Iterator[bytes], presses: Presses) -> Iterator[bytes]:
    for part in parts:
        _go_on(presses)
        yield part


def _told(parts: Iterator[bytes], archive: int, tell: Tell) -> Iterator[bytes]:
    """The same parts; of a large archive it is told how far it is."""
    sent = said = 0
    for part in parts:
        yield part
        sent += len(part)
        if sent - said >= PROGRESS_BYTES and sent < archive:
            said = sent
            tell(f"{size(sent)} of {size(archive)} are sent")


def _tell_accepted(accepted: Accepted, tell: Tell) -> None:
    tell(f"{accepted.name} changes {_files(accepted.changed)}")
    for remark in accepted.remarks:
        tell(remark)


def _show_plan(would: Accepted, *, json: bool) -> int:
    """Of a dry run: what would change, and what would be refused."""
    if json:
        print_json(UpdateAnswer(accepted=would))
    else:
        for sentence in would.objections:
            say(f"would be refused: {sentence}")
        if would.against_running or not would.objections:
            say(f"{would.name} would change, against what runs, {_files(would.against_running)}")
        for remark in would.remarks:
            say(remark)
    return 1 if would.objections else 0


def _files(paths: Sequence[str]) -> str:
    """All of them, one line each if they are many."""
    if not paths:
        return "no file"
    count = _count(len(paths))
    if len(paths) <= IN_LINE:
        return f"{count}: {', '.join(paths)}"
    return "\n".join([f"{count}:", *(f"  {path}" for path in paths)])


def _count(files: int) -> str:
    return "1 file" if files == 1 else f"{files} files"


def size(count: int) -> str:
    """Bytes with a unit: 812 bytes, 48.2 kB, 3.1 MB."""
    if count < 1000:
        return f"{count} bytes"
    return f"{count / 1e3:.1f} kB" if count < 1e6 else f"{count / 1e6:.1f} MB"
