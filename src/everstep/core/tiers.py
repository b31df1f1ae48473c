"""Which step goes to which disk, and when: rules in the sense of rules.py.

Two tiers lie outside of memory: what all machines share, where a step is published, and each
machine's own disk. A rank keeps one slot for both, so one step at a time is on its way. With
backups it is the machine-safe step, which is kept anyway; without, a step that every rank can still
hear of before it saves it.
"""

from __future__ import annotations

import math

from everstep.actions import ControllerAction, PersistStep, PublishStep
from everstep.core.deciding import Deciding
from everstep.core.history import VersionBook
from everstep.core.restore import safe_on_local_disks
from everstep.core.state import Phase, State
from everstep.core.updates import waits_for_copy
from everstep.model import NO_STEP, Generation, Seconds, Step, Value

DISK_LEAD_S: Seconds = 2.0
"""A step is kept for the disk only if it lies this far ahead of what is known to be finished: every
rank must hear of it before it saves it. Nothing is in a hurry there."""
NEAR_S: Seconds = 3.0
"""A step that is due is ordered when it is no further ahead than the lead and this: progress comes
once a second, and what is waited for keeps others waiting."""


class _Due(Value, frozen=True, kw_only=True):
    """A step that a tier should have."""

    local_disk: bool
    step: Step
    generation: Generation
    why: str


def persist_step(d: Deciding) -> list[ControllerAction]:
    """Put a step on disk when one is due: the earliest, and on all disks where one is due by then.

    Where both are due they get the same step, so none waits for the other for ever.
    """
    state = d.state
    if state.persisting or not advancing(state):
        return []
    due = [_due(d, local_disk=local_disk) for local_disk in (True, False)]
    first = min((item.step for item in due if item is not None), default=None)
    return [
        order
        for item in due
        if item is not None and item.step == first
        for order in _orders(d, item)
    ]


def _orders(d: Deciding, item: _Due) -> list[ControllerAction]:
    safe = safe_on_local_disks(d.state) if item.local_disk else NO_STEP
    return [
        PersistStep(
            id=d.id(),
            cause=d.event,
            why=item.why,
            machine=machine.machine,
            generation=item.generation,
            step=item.step,
            local_disk=item.local_disk,
            safe=safe,
        )
        for machine in d.state.members()
    ]


def _due(d: Deciding, *, local_disk: bool) -> _Due | None:
    state, spec = d.state, d.state.job.checkpoint
    tier = state.tier(local_disk=local_disk)
    every = spec.local_disk_every if local_disk else spec.disk_every
    if every.never or d.now < tier.not_before or (local_disk and not spec.local_directory):
        return None
    again = None if local_disk else waits_for_copy(state, d.now)
    steps, seconds = (every.steps, every.seconds) if again is None else (0, 0.0)
    # A newer one would take the place of the one that grows old enough for `again`.
    grows = again is not None and bool(state.published)
    if grows or (seconds and d.now < tier.begun_at + seconds):
        return None
    place = "each machine's own disk" if local_disk else "disk"
    why = f"a step goes to {place} {every}" if again is None else _for_overlap(again)
    if backs_up(state) and not _pausing(d):
        safe = state.safe
        if safe is None or safe.step < tier.after + max(1, steps) or state.single:
            return None
        return _Due(
            local_disk=local_disk,
            step=safe.step,
            generation=safe.generation,
            why=f"{why}; step {safe.step} is the newest machine-safe one",
        )
    newest = max(state.finished_by_one, state.finished_by_all)
    step = _next(state, tier.after, steps)
    if step is None:
        return None
    return _Due(
        local_disk=local_disk,
        step=step,
        generation=state.generation,
        why=f"{why}; the newest finished step is {newest}",
    )


def _for_overlap(book: VersionBook) -> str:
    return f"v{book.number} is to begin {book.overlap} steps back, and no step is kept on disk"


def _next(state: State, after: Step, steps: int) -> Step | None:
    """The next multiple of `steps` if it is near, the first possible step if that one is missed."""
    newest = max(state.finished_by_one, state.finished_by_all)
    first = newest + 1 + steps_in(state, DISK_LEAD_S)
    if not steps:
        return Step(first)
    wanted = (max(after, 0) // steps + 1) * steps
    near = wanted <= first + steps_in(state, NEAR_S)
    return Step(max(wanted, first)) if near else None


def _pausing(d: Deciding) -> bool:
    """Whether a backup failed and is not due again: the time for disk copies of steps of their own.

    At any other time they would take turns for ever where steps are short, and one rank would have
    three steps to keep: the machine-safe one, the next one, and the one for the disk.
    """
    state = d.state
    return state.backups_failed > 0 and state.backup is None and d.now < state.backup_not_before


def advancing(state: State) -> bool:
    """Whether all ranks are known to train, and how fast."""
    known = state.finished_by_all > NO_STEP and state.step_s is not None
    return known and state.phase is Phase.RUNNING and not state.failures and not state.exits


def steps_in(state: State, time_s: Seconds) -> int:
    """Steps that are done in this time, rounded up."""
    return math.ceil(time_s / max(state.step_s or 0.0, 1e-6))


def backs_up(state: State) -> bool:
    """Whether shards are also kept in the memory of a second machine."""
    members = (state.machines[name] for name in state.positions.values())
    return state.job.backs_up and all(machine.shard_port for machine in members)


def publish_step(d: Deciding) -> list[ControllerAction]:
    persist = d.state.disk.persist
    if persist is None or persist.awaiting or persist.publishing or persist.failed:
        return []
    return [publish(d)]


def publish(d: Deciding) -> PublishStep:
    """The manifest of the step that every machine has persisted."""
    persist = d.state.disk.persist
    assert persist is not None, "publish() is called only while a step is persisted"
    return PublishStep(
        id=d.id(),
        cause=d.event,
        why=f"every machine has its shards of step {persist.step} on disk",
        step=persist.step,
        generation=persist.generation,
    )
