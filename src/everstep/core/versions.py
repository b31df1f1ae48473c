"""The books of code versions: what was asked for, what runs, what ran well.

observe.py and commit.py have facts and decisions noted here; spreading.py says who has a version,
updates.py decides what to do. A version is pending until it runs or is refused. What has run is
rolled back to only if it ran well: many steps, or a long time, between two failures.
"""

from __future__ import annotations

from everstep.actions import RefuseUpdate, SwitchCode, TryVersion
from everstep.core.history import Condition, Ran, VersionBook
from everstep.core.state import State
from everstep.events import RollbackRequested, UpdateRequested
from everstep.model import NO_STEP, NO_VERSION, CodeVersion, Seconds, Step, VersionId
from everstep.sightings import LossesCompared

WAITING = (Condition.PENDING, Condition.READY)
ROLLBACK = "rollback"
"""What people are told about: a rollback that somebody asked for and that cannot be."""
LOSSES = "losses"
"""The same: losses that were others when steps were done again."""


# --- words ---------------------------------------------------------------------------------------


def named(state: State, version: VersionId) -> str:
    """As people know it: "v3 (4f2a9c81)"."""
    book = state.versions.get(version)
    return f"v{book.number} ({version[:8]})" if book is not None else f"version {version[:8]!r}"


def asked_for(book: VersionBook, now: Seconds) -> str:
    """Who wants it, since when, and what for."""
    return _asked(book.by, now - book.at, book.note)


def rollback_asked_for(state: State, now: Seconds) -> str:
    request, since_s = state.rollback, now - state.rollback_at
    return "" if request is None else _asked(request.by, since_s, request.note)


def _asked(by: str, since_s: Seconds, note: str) -> str:
    when = "just now" if since_s < 1.0 else f"{span(since_s)} ago"
    return f"{by or 'somebody'} asked for it {when}" + (f" ({note})" if note else "")


def span(seconds: Seconds) -> str:
    """A time as people say it."""
    for unit_s, unit in ((172800.0, "days"), (7200.0, "h"), (120.0, "min")):
        if seconds >= unit_s:
            return f"{seconds / _UNITS_S[unit]:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


_UNITS_S = {"days": 86400.0, "h": 3600.0, "min": 60.0}


# --- what is in the books ------------------------------------------------------------------------


def pending(state: State) -> list[VersionBook]:
    """Those that wait to be put in place, in the order in which they came."""
    return [book for book in state.versions.values() if book.condition in WAITING]


def running(state: State) -> VersionBook | None:
    return state.versions.get(state.version)


def within(state: State, book: VersionBook) -> list[VersionBook]:
    """Those whose changes are in it and that it does not only build on: they have not run."""
    found: dict[VersionId, VersionBook] = {}
    left = [book.code.base, *book.code.includes]
    while left:
        earlier = state.versions.get(left.pop())
        if earlier is None or earlier is book or earlier.code.version in found:
            continue
        if earlier.condition not in (Condition.RUNNING, Condition.RAN):
            found[earlier.code.version] = earlier
            left += [earlier.code.base, *earlier.code.includes]
    return list(found.values())


def built_on_bad(state: State, book: VersionBook) -> VersionBook | None:
    """What is in it and was refused or rolled back, if anything."""
    bad = (Condition.REFUSED, Condition.ROLLED_BACK)
    return next((each for each in within(state, book) if each.condition in bad), None)


def last_good(state: State) -> VersionBook | None:
    """The newest one before what runs that ran well.

    If none did, the version of the submission, provided that it ran at all: that nobody waited for
    its hundredth step says nothing against it, and it is what the job was submitted with.
    """
    ran = [book for book in state.versions.values() if book.condition is Condition.RAN]
    well = [book for book in ran if any(each.well for each in book.runs)]
    if not well:
        well = [book for book in ran if book.number == 1 and _ran_at_all(state, book)]
    return max(well, key=lambda book: (_ended_at(book), book.number), default=None)


def _ran_at_all(state: State, book: VersionBook) -> bool:
    longest_s = max((each.longest_s for each in book.runs), default=0.0)
    return steps_of(book) > 0 or longest_s >= state.job.policy.proven_after_s


def _ended_at(book: VersionBook) -> Seconds:
    last = book.runs[-1] if book.runs else None
    return last.until if last is not None and last.until is not None else float("-inf")


def steps_of(book: VersionBook) -> int:
    """New steps that it did, in all."""
    return sum(each.steps for each in book.runs)


def ran_s(book: VersionBook, now: Seconds) -> Seconds:
    """How long it ran, in all."""
    return sum((now if each.until is None else each.until) - each.since for each in book.runs)


def finished(state: State) -> Step:
    """The newest step that all ranks finished, as far as it is known now."""
    told = [m.finished for m in state.members() if m.finished > NO_STEP]
    return max(state.furthest, min(told, default=NO_STEP))


# --- facts ---------------------------------------------------------------------------------------


def job_came(state: State, now: Seconds) -> None:
    """The code that the job was submitted with is the first version."""
    spec = state.job.code
    if spec.version == NO_VERSION:
        return
    state.version = spec.version
    before = state.published[-1].step if state.published else NO_STEP
    state.versions[spec.version] = VersionBook(
        code=CodeVersion(
            version=spec.version,
            source=", ".join(spec.roots),
            files=spec.files,
            size_bytes=spec.size_bytes,
        ),
        number=1,
        by="",
        at=now,
        event=state.seq,
        condition=Condition.RUNNING,
        tried=True,
        runs=[Ran(since=now, from_step=before)],
    )


def update_requested(state: State, event: UpdateRequested, now: Seconds) -> None:
    """One more version; or one that is known already, once more.

    One that waits is as urgent as the more urgent request. One that was refused or rolled back, or
    whose place another one took, gets its second chance. What runs needs no update.
    """
    version = event.code.version
    known = state.versions.get(version)
    if version == NO_VERSION or (known is not None and known.condition is Condition.RUNNING):
        return
    book = VersionBook(
        code=event.code,
        number=len(state.versions) + 1,
        by=event.by,
        note=event.note,
        at=now,
        event=state.seq,
        urgent=event.urgent,
        due_at=now + (event.within_s or state.job.policy.update_within_s),
        overlap=max(0, event.overlap),
        untried=event.untried,
    )
    if known is not None:
        _take_over(book, known)
        if known.condition not in WAITING:
            del state.versions[version]
    state.versions[version] = book


def _take_over(book: VersionBook, known: VersionBook) -> None:
    """What was known of this version before, and still holds."""
    book.number, book.runs, book.repeats = known.number, known.runs, known.repeats
    if known.condition not in WAITING:
        return
    book.event = known.event  # it keeps its place: what came since is built on it
    book.urgent = book.urgent or known.urgent
    book.due_at = min(book.due_at, known.due_at)
    book.overlap = max(book.overlap, known.overlap)
    book.untried = book.untried or known.untried
    book.tried, book.problem, book.detail = known.tried, known.problem, known.detail
    book.trials, book.trial, book.trial_at = known.trials, known.trial, known.trial_at
    book.tried_on = known.tried_on
    book.untold, book.elsewhere = known.untold, known.elsewhere
    book.asked, book.not_held, book.reasons = known.asked, known.not_held, known.reasons


def rollback_requested(state: State, event: RollbackRequested, now: Seconds) -> None:
    """A person wants an earlier one. The newest request counts."""
    state.rollback, state.rollback_event, state.rollback_at = event, state.seq, now


def steps_done(state: State, count: int, now: Seconds) -> None:
    """So many new steps were finished by all ranks, under the version that runs."""
    run = _run(state)
    if run is None:
        return
    new = max(0, min(count, state.finished_by_all - state.restored))
    run.steps += new
    run.stretch += new
    if state.running_since is not None:
        run.longest_s = max(run.longest_s, now - state.running_since)
    _judge(state, run)


def _run(state: State) -> Ran | None:
    book = running(state)
    return book.runs[-1] if book is not None and book.runs else None


def _judge(state: State, run: Ran) -> None:
    policy = state.job.policy
    enough = run.stretch >= policy.ran_well_steps or run.longest_s >= policy.ran_well_s
    run.well = run.well or enough


def losses_compared(state: State, event: LossesCompared, now: Seconds) -> None:
    """What came of the steps that were done again; told once all machines have said it."""
    del now
    book, members = running(state), state.members()
    mine = any(machine.machine == event.machine for machine in members)
    if book is None or not mine or event.generation != state.generation:
        return
    if state.compare_through == NO_STEP:
        return
    book.compared[event.machine] = event
    if all(machine.machine in book.compared for machine in members):
        book.repeats = _repeats(state, list(book.compared.values()))
        if any(told.differs is not None for told in book.compared.values()):
            book.to_tell = f"{named(state, book.code.version)}: {book.repeats}"
        book.compared = {}
        state.compare_through = NO_STEP


def _repeats(state: State, told: list[LossesCompared]) -> str:
    steps = f"steps {min(each.first for each in told)} to {max(each.last for each in told)}"
    other = [(each.differs.step, each.differs.rank, each) for each in told if each.differs]
    if other:
        step, rank, first = min(other, key=lambda found: found[:2])
        return (
            f"rank {rank}'s loss of step {step} was {first.before!r}, now it is {first.after!r}:"
            f" the first of {steps} that has other bits"
        )
    compared = sum(each.compared for each in told)
    if not compared:
        return f"no loss of {steps} could be compared: unknown from before, or not told now"
    ranks = sum(each.compared > 0 for each in told) * state.job.nproc_per_node
    return f"losses of {steps} came out bit for bit as before on {ranks} ranks"


# --- decisions -----------------------------------------------------------------------------------


def generation_ends(state: State, now: Seconds) -> None:
    """Its ranks are stopped, or some of them are gone: what it did without a failure is known."""
    run = _run(state)
    if run is not None and state.running_since is not None and state.furthest == NO_STEP:
        # Nothing tells a script that reports no steps from one that hangs, but its failure does.
        until = min((failure.at for failure in state.failures), default=now)
        run.longest_s = max(run.longest_s, until - state.running_since)
        _judge(state, run)
    book = running(state)
    if book is not None and run is not None:
        run.stretch = 0
        book.compared = {}
    if state.finished_by_all >= state.compare_through:
        state.compare_through = NO_STEP
    state.overlap_to = None


def code_starts(state: State, now: Seconds) -> None:
    """What waited for machines before has not run."""
    run = _run(state)
    if run is not None and state.generation == 1:
        run.since = now


def switch_code(state: State, action: SwitchCode, now: Seconds) -> None:
    """The next generation runs it."""
    old, new = state.versions.get(action.previous), state.versions.get(action.version)
    if new is None:
        return
    included = [] if action.rolled_back else within(state, new)
    if old is not None:
        if old.runs:  # what it did since it last told of steps
            old.runs[-1].steps += max(0, finished(state) - state.furthest)
        _close(old, action, now)
    if action.rolled_back:
        _drop_later(state, new, action)
    for book in included:
        if book.condition in WAITING:
            book.condition = Condition.INCLUDED
    new.condition, new.why, new.compared = Condition.RUNNING, "", {}
    done = finished(state)
    new.runs.append(Ran(since=now, from_step=done))
    state.version = action.version
    overlap = 0 if action.rolled_back else max(book.overlap for book in (new, *included))
    state.overlap_to = Step(done - overlap) if overlap and done > NO_STEP else None
    state.compare_through = done if overlap else NO_STEP
    wanted = state.rollback
    if wanted is not None and (
        wanted.version == action.version or (action.rolled_back and wanted.version is None)
    ):
        state.rollback = None


def _close(old: VersionBook, action: SwitchCode, now: Seconds) -> None:
    if old.runs:
        old.runs[-1].until = now
    old.condition = Condition.ROLLED_BACK if action.rolled_back else Condition.RAN
    old.why = action.why if action.rolled_back else ""


def _drop_later(state: State, target: VersionBook, action: SwitchCode) -> None:
    """What ran between the two is undone as well: nobody rolls back to it from there."""
    for book in state.versions.values():
        if book.condition is Condition.RAN and _ended_at(book) > _ended_at(target):
            book.condition, book.why = Condition.ROLLED_BACK, action.why


def refuse_update(state: State, action: RefuseUpdate, now: Seconds) -> None:
    """It is not put in place, and nobody is asked about it any more."""
    del now
    book = state.versions.get(action.version)
    if book is None:
        return
    book.condition, book.why, book.detail = Condition.REFUSED, action.why, action.detail
    for key, order in list(state.outstanding.items()):
        if isinstance(order, TryVersion) and order.version == action.version:
            del state.outstanding[key]


def people_heard(state: State, about: str) -> None:
    """They were told, so nothing is left to tell."""
    if about == ROLLBACK:
        state.rollback = None
    elif about == LOSSES:
        for book in state.versions.values():
            book.to_tell = ""
