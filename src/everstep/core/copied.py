"""Folds what agents and the shell tell of copies: on disks, in stores, in the memory of peers.

Part of observe.py, which calls it; nothing here decides.
"""

from __future__ import annotations

from everstep.actions import PersistStep
from everstep.core.replicas import differing
from everstep.core.state import (
    BACKUP_LEAD_MAX_S,
    BACKUP_LEAD_S,
    Backup,
    Machine,
    Phase,
    State,
    TierBooks,
)
from everstep.events import (
    BackupFailed,
    PersistFailed,
    StepBackedUp,
    StepPersisted,
    StepPublished,
)
from everstep.model import Copy, MachineId, Published, Rank, Seconds

PERSIST_RETRY_S: Seconds = 30.0
"""After a step did not get to a disk: a full one is rarely emptied within a step."""
BACKUP_RETRY_S: Seconds = 10.0
"""After a backup that failed on some machine: what failed (a full memory, a cut link) rarely heals
within a step."""


def step_persisted(state: State, event: StepPersisted, now: Seconds) -> None:
    order = state.outstanding.get(event.action)
    machine = state.machines.get(event.machine)
    if isinstance(order, PersistStep) and order.local_disk and machine is not None:
        _add_to_local_disk(state, machine, order)
    tier = _persist_answered(state, event)
    if tier is not None:
        _end_persist(state, tier, now)


def _add_to_local_disk(state: State, machine: Machine, order: PersistStep) -> None:
    """It keeps this step and the one that was safe before."""
    ranks = () if machine.node_rank is None else state.job.ranks_of(machine.node_rank)
    added = [Copy(rank=Rank(r), step=order.step, generation=order.generation) for r in ranks]
    kept = [copy for copy in machine.local_disk if copy.step == order.safe]
    machine.local_disk = (*kept, *added)


def persist_failed(state: State, event: PersistFailed, now: Seconds) -> None:
    tier = _persist_answered(state, event)
    if tier is not None and tier.persist is not None:
        tier.persist.failed = tier.persist.failed or f"{event.machine}: {event.reason}"
        _end_persist(state, tier, now)


def _persist_answered(state: State, event: StepPersisted | PersistFailed) -> TierBooks | None:
    state.outstanding.pop(event.action, None)
    for tier in (state.disk, state.local_disk):
        if tier.persist is not None and tier.persist.awaiting.get(event.machine) == event.action:
            del tier.persist.awaiting[event.machine]
            return tier
    return None


def _end_persist(state: State, tier: TierBooks, now: Seconds) -> None:
    """A copy that one machine could not make is useless to all: another step is tried later."""
    persist = tier.persist
    if persist is None or persist.awaiting:
        return
    if persist.failed:
        _missed(tier, persist.failed, now)
    elif tier is state.local_disk:
        tier.persist, tier.failed = None, ""
        tier.after = persist.step


def _missed(tier: TierBooks, why: str, now: Seconds) -> None:
    tier.persist, tier.failed = None, why
    tier.not_before = now + PERSIST_RETRY_S


def step_backed_up(state: State, event: StepBackedUp, now: Seconds) -> None:
    backup = _backup_answered(state, event.machine, event.action)
    if backup is not None:
        backup.replicated.extend(event.replicated)
        _end_backup(state, backup, now)


def backup_failed(state: State, event: BackupFailed, now: Seconds) -> None:
    backup = _backup_answered(state, event.machine, event.action)
    if backup is not None:
        backup.late = event.late and (backup.late or not backup.failed)
        backup.failed = backup.failed or f"{event.machine}: {event.reason}"
        _end_backup(state, backup, now)


def _backup_answered(state: State, name: MachineId, action: str) -> Backup | None:
    state.outstanding.pop(action, None)
    backup = state.backup
    if backup is None or backup.awaiting.get(name) != action:
        return None
    del backup.awaiting[name]
    return backup


def _end_backup(state: State, backup: Backup, now: Seconds) -> None:
    """Complete on every machine: it is the machine-safe step. Failed on one: it is none.

    Nor is it if ranks that sent slices of the same tensors did not have the same.
    """
    if backup.awaiting:
        return
    state.backup = None
    if not backup.failed and (why := differing(backup.replicated)):
        backup.failed = state.unequal = why
    if not backup.failed:
        state.safe = Published(step=backup.step, generation=backup.generation)
        state.compared = [*state.compared, state.safe][-2:]
        state.single = False
        state.backups_failed = 0
        state.backup_lead_s = max(BACKUP_LEAD_S, 0.9 * state.backup_lead_s)
    elif backup.late and state.backup_lead_s < BACKUP_LEAD_MAX_S:
        state.backup_lead_s = min(2 * state.backup_lead_s, BACKUP_LEAD_MAX_S)
    else:
        state.backups_failed += 1
        state.backup_not_before = now + BACKUP_RETRY_S


def step_published(state: State, event: StepPublished, now: Seconds) -> None:
    """A step of an abandoned history (newer than what was restored since) is not kept."""
    state.outstanding.pop(event.action, None)
    persist = state.disk.persist
    if persist is not None and persist.publishing == event.action:
        state.disk.persist, state.disk.failed = None, ""
        if event.reason:
            _missed(state.disk, event.reason, now)
    abandoned = event.generation < state.generation and event.step > state.restored
    if not event.reason and not (abandoned and state.phase is not Phase.STOPPING):
        entry = Published(step=event.step, generation=event.generation)
        state.disk.after = max(state.disk.after, event.step)
        state.inherited = [each for each in state.inherited if each != entry]
        state.stored_bytes = event.stored_bytes
        if entry not in state.published:
            state.published.append(entry)
            del state.published[: -state.job.checkpoint.keep]
