"""What people are shown of code versions: pure functions from the core's state to structs.

Part of views.py for /v1/versions and `everstep versions`, and for the line about code in `status`.
People call versions v1, v2...; their ids are for machines.
"""

from __future__ import annotations

from everstep.actions import Rung
from everstep.core.alerts import usable
from everstep.core.history import Condition, Ran, VersionBook
from everstep.core.state import State
from everstep.core.versions import WAITING, ran_s, steps_of
from everstep.model import (
    NO_VERSION,
    CodeOrigin,
    JobId,
    MachineId,
    Seconds,
    Step,
    Value,
    VersionId,
)


class RunView(Value, frozen=True, kw_only=True):
    """One time that a version ran."""

    since: Seconds
    until: Seconds | None
    """None: it runs."""
    from_step: Step
    steps: int
    """New ones that were done meanwhile."""
    well: bool


class VersionView(Value, frozen=True, kw_only=True):
    """One code version."""

    name: str
    """v1, v2..."""
    version: VersionId
    condition: Condition
    by: str
    note: str
    at: Seconds
    source: str
    origin: CodeOrigin
    files: int
    size_bytes: int
    base: str
    """Name of the version that it changes; empty for the first."""
    includes: tuple[str, ...]
    """Names of versions whose changes are in it and that never ran by themselves."""
    changed: tuple[str, ...]
    requirements: tuple[str, ...]
    remarks: tuple[str, ...]
    urgent: bool
    due_at: Seconds | None
    """When a lazy one that waits is put in place at the latest."""
    overlap: int
    why: str
    """Of one that is refused or was rolled back."""
    failure: str
    """What it was rolled back for, if it failed."""
    detail: str
    tried: bool
    """Some machine has imported what its script imports."""
    untold: tuple[str, ...]
    """Why nothing came of attempts to do that, if so."""
    elsewhere: tuple[str, ...]
    """Files that it imports and that are not versioned."""
    held: int
    """Machines that could run it now."""
    not_held: dict[MachineId, str]
    """Machines that could not get it so far, and why."""
    runs: tuple[RunView, ...]
    ran_s: Seconds
    ran_steps: int
    repeats: str
    """Whether losses came out as before when steps were done again."""


class VersionsView(Value, frozen=True, kw_only=True):
    """Answer to /v1/versions."""

    job: JobId
    versions: tuple[VersionView, ...]
    """In the order in which they came."""
    running: str
    """Name of the one that runs, or that the next generation runs; empty if there is none."""
    machines: int
    """Machines that have to hold a version before it is put in place."""
    roots: tuple[str, ...]
    why_none: str
    """Why the code of this job is not versioned, if it is not."""


class CodeView(Value, frozen=True, kw_only=True):
    """What `status` says of code."""

    running: str = ""
    """Name of the version that runs; empty: the code is not versioned."""
    version: VersionId = NO_VERSION
    text: str = ""
    """What it is and since when, as a clause; of no version, why there is none."""
    waiting: tuple[str, ...] = ()
    """One clause for each version that is to be put in place, the oldest first."""


def name_of(state: State, version: VersionId) -> str:
    """What people call it; empty if it is none that the job knows."""
    book = state.versions.get(version)
    return "" if book is None else f"v{book.number}"


def in_order(state: State) -> list[VersionBook]:
    """By their names. One that was asked for again is the last of the core's."""
    return sorted(state.versions.values(), key=lambda book: book.number)


def versions(state: State, now: Seconds) -> VersionsView:
    """Every version of the job's code."""
    spec = state.job
    return VersionsView(
        job=spec.job,
        versions=tuple(_version(state, book, now) for book in in_order(state)),
        running=name_of(state, state.version),
        machines=len(_holders(state)),
        roots=spec.code.roots,
        why_none=spec.code.why_none,
    )


def code(state: State, now: Seconds) -> CodeView:
    """The lines of `status` about it."""
    book = state.versions.get(state.version)
    if book is None:
        return CodeView(text=state.job.code.why_none)
    return CodeView(
        running=name_of(state, state.version),
        version=state.version,
        text=f"{book.code.source}{_sent_by(book)}",
        waiting=tuple(_waits(state, each, now) for each in _waiting(state)),
    )


def _waiting(state: State) -> list[VersionBook]:
    return [book for book in in_order(state) if book.condition in WAITING]


def _waits(state: State, book: VersionBook, now: Seconds) -> str:
    held, wanted = _held(state, book.code.version), len(_holders(state))
    where = f"held by {held} of {wanted} machines"
    if book.condition is Condition.READY:
        where = "ready"
    when = "urgent"
    if not book.urgent:
        when = f"lazy, put in place in {max(0.0, book.due_at - now) / 3600:.1f} h at the latest"
    return f"v{book.number} ({when}) is {where}{_sent_by(book)}"


def _sent_by(book: VersionBook) -> str:
    said = f": {book.note}" if book.note else ""
    return f", sent by {book.by}{said}" if book.by else said


def _version(state: State, book: VersionBook, now: Seconds) -> VersionView:
    told = book.code
    lazy = not book.urgent and book.condition in WAITING
    return VersionView(
        name=f"v{book.number}",
        version=told.version,
        condition=book.condition,
        by=book.by,
        note=book.note,
        at=book.at,
        source=told.source,
        origin=told.origin,
        files=told.files,
        size_bytes=told.size_bytes,
        base=name_of(state, told.base),
        includes=tuple(filter(None, (name_of(state, each) for each in told.includes))),
        changed=told.changed,
        requirements=told.requirements,
        remarks=told.remarks,
        urgent=book.urgent,
        due_at=book.due_at if lazy else None,
        overlap=book.overlap,
        why=book.why,
        failure=failure_of(state, book),
        detail=book.detail,
        tried=book.tried,
        untold=tuple(book.untold),
        elsewhere=book.elsewhere,
        held=_held(state, told.version),
        not_held={name: book.reasons.get(name, "") for name in book.not_held},
        runs=tuple(_run(ran) for ran in book.runs),
        ran_s=ran_s(book, now),
        ran_steps=steps_of(book),
        repeats=book.repeats,
    )


def failure_of(state: State, book: VersionBook) -> str:
    """What failed when the version was rolled back, as a sentence; empty if people wanted it."""
    until = book.runs[-1].until if book.runs else None
    if book.condition is not Condition.ROLLED_BACK or until is None:
        return ""
    for incident in reversed(state.incidents):
        for taken in incident.rungs:
            if taken.rung is Rung.ROLLBACK and taken.at == until:
                own = "" if taken.failure == Rung.ROLLBACK else taken.failure
                return incident.cause or own
    return ""


def _run(ran: Ran) -> RunView:
    return RunView(
        since=ran.since,
        until=ran.until,
        from_step=ran.from_step,
        steps=ran.steps,
        well=ran.well,
    )


def _holders(state: State) -> list[MachineId]:
    """Machines that run ranks, or could be woken."""
    return [m.machine for m in state.machines.values() if usable(m) and m.connected]


def _held(state: State, version: VersionId) -> int:
    machines = (state.machines[name] for name in _holders(state))
    return sum(1 for m in machines if m.versions is not None and version in m.versions)
