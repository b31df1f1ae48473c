"""Which step a new generation restores: the newest of which every rank has a complete copy.

Pure arithmetic over what agents reported; called by core/rules.py and core/ending.py. A copy is
named by its step and by the generation that computed it: shards belong together only if both agree,
because a step that was computed twice need not have the same bits. A rank loads from its machine's
memory, else from the memory of a machine that keeps its backup, else from its machine's own disk,
else from what all machines share; a published step serves every rank, anywhere. A backup that is a
part serves if the slices that it lacks are in somebody's memory, too, and only if the replicas of
that step were compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from everstep.core.regrown import Sources, Taken, best_of, take_all
from everstep.core.state import Machine, Spoiled, State
from everstep.model import (
    NO_GENERATION,
    NO_STEP,
    Copy,
    Generation,
    MachineId,
    Published,
    Rank,
    Step,
    Value,
    ranks_in,
)

LEFT_MAX = 64
"""Restarts whose left-behind copies are known one by one."""
SCRATCH = Published(step=NO_STEP, generation=NO_GENERATION)


class Copies(Value, frozen=True, kw_only=True):
    """Everything that could be restored."""

    local: tuple[Copy, ...] = ()
    """In the memory of the machine that will run their rank."""
    backups: tuple[tuple[MachineId, Copy], ...] = ()
    """In the memory of another machine, which is not evicted."""
    local_disk: tuple[Copy, ...] = ()
    """On the disk of the machine that will run their rank."""
    published: tuple[Published, ...] = ()
    homes: tuple[tuple[Rank, MachineId], ...] = ()
    """The machines that give others slices of what they hold of their own ranks."""
    compared: tuple[Published, ...] = ()
    """Steps of which replicas were found to be equal: parts of others are worth nothing."""


class Choice(Value, frozen=True, kw_only=True):
    """The step to restore and where its shards lie."""

    copy: Published
    """SCRATCH for a start from scratch."""
    local: int
    """Ranks that have it in their machine's memory."""
    fetch: tuple[tuple[Rank, MachineId], ...]
    """Ranks whose shard comes from another machine's memory, and from which."""
    local_disk: int
    """Ranks that read it from their machine's own disk."""
    disk: int
    """Ranks that read it from where all machines do."""
    why: str
    joins: dict[Rank, tuple[tuple[Rank, MachineId], ...]] = {}
    """For each part among `fetch`: where the slices of all replicas lie, its own among them."""
    restores: dict[Rank, Rank] = {}
    """Of a step that was computed with more or fewer replicas: whose shard each rank gets. It is
    that rank's which is fetched and joined."""


def choose(ranks: Sequence[Rank], copies: Copies) -> Choice:
    """Newest step that all `ranks` can restore, each from the nearest place."""
    held: dict[Published, set[Rank]] = {entry: set() for entry in copies.published}
    stored: dict[Published, set[Rank]] = {}
    # Sets are only asked, never iterated: their order decides nothing.
    for copy in copies.local:
        held.setdefault(_key(copy), set()).add(copy.rank)
    for _, copy in copies.backups:
        held.setdefault(_key(copy), set())
    for copy in copies.local_disk:
        held.setdefault(_key(copy), set())
        stored.setdefault(_key(copy), set()).add(copy.rank)
    kept = {key: _kept(copies, key, local) for key, local in held.items()}
    on_disk = set(copies.published)
    wanted = set(ranks)
    complete = [
        key
        for key, local in held.items()
        if key in on_disk or wanted <= local | kept[key].keys() | stored.get(key, set())
    ]
    if not complete:
        why = "no step has a complete copy of every rank: training starts at step 0"
        return Choice(copy=SCRATCH, local=0, fetch=(), local_disk=0, disk=0, why=why)
    best = max(complete, key=lambda key: (key.step, key.generation))
    peers = kept[best]
    local = sum(rank in held[best] for rank in ranks)
    fetch = tuple((rank, peers[rank].machine) for rank in ranks if rank in peers)
    near = held[best] | peers.keys()
    local_disk = sum(rank in stored.get(best, ()) for rank in ranks if rank not in near)
    disk = len(ranks) - local - len(fetch) - local_disk
    why = _why(
        best,
        {
            "in memory": local,
            "in a peer's memory": len(fetch),
            "on the machine's own disk": local_disk,
            "on disk": disk,
        },
    )
    return Choice(
        copy=best,
        local=local,
        fetch=fetch,
        local_disk=local_disk,
        disk=disk,
        why=why,
        joins={rank: peers[rank].joins for rank, _ in fetch if peers[rank].joins},
    )


class _Backup(NamedTuple):
    """A backup from which a rank can be restored."""

    machine: MachineId
    joins: tuple[tuple[Rank, MachineId], ...]
    """Where the slices are; empty for a whole one."""


def _kept(copies: Copies, key: Published, local: set[Rank]) -> dict[Rank, _Backup]:
    """For each rank that has no copy of this step in its machine's memory: its backup, if any."""
    found: dict[Rank, tuple[MachineId, Copy]] = {}
    for machine, copy in copies.backups:
        if _key(copy) == key and (copy.rank not in found or not copy.replicas):
            found[copy.rank] = (machine, copy)
    sources = {rank: machine for rank, (machine, _) in found.items()}
    sources |= {rank: machine for rank, machine in copies.homes if rank in local}
    backups = {}
    for rank, (machine, copy) in found.items():
        if rank in local:
            continue
        replicas = list(ranks_in(copy.replicas))
        if not replicas:
            backups[rank] = _Backup(machine, ())
        elif key in copies.compared and all(other in sources for other in replicas):
            joins = tuple((other, sources[other]) for other in replicas)
            backups[rank] = _Backup(machine, joins)
    return backups


def _key(copy: Copy) -> Published:
    return Published(step=copy.step, generation=copy.generation)


def _why(best: Published, counts: dict[str, int]) -> str:
    places = [f"{n} {place}" for place, n in counts.items() if n or place == "in memory"]
    return (
        f"step {best.step} is the newest step of which every rank has a complete copy:"
        f" {', '.join(places)}"
    )


def choose_from(state: State) -> Choice:
    """The choice for the machines as they are: copies of members, backups of all that are well.

    A step is a candidate only if training's numbers were finite by then.
    """
    choice = _newest(state)
    bound = state.overlap_to
    if bound is not None and choice.copy.step > bound:
        choice = _further_back(state, bound)
    if choice.copy == SCRATCH:
        other = None if bound is None else _choose_regrown(state, bound, same_size=True)
        choice = other or _choose_regrown(state, same_size=True) or choice
    every = _copies_of(state)
    if _sound(state, every) == every:
        return choice
    bad = ", ".join(str(each.step) for each in state.spoiled)
    return replace(choice, why=f"{choice.why}; not counted is what was saved of bad steps ({bad})")


def _newest(state: State, bound: Step | None = None) -> Choice:
    """The newest step, up to this one if there is a bound: of the job's size now, or of another."""
    ranks = [Rank(rank) for rank in range(state.job.world_size)]
    sound = _sound(state, copies_of(state))
    choice = choose(ranks, sound if bound is None else _up_to(sound, bound))
    other = _choose_regrown(state, bound)
    if other is not None and _order(other.copy) > _order(choice.copy):
        return other
    return choice


def _further_back(state: State, step: Step) -> Choice:
    """The newest step that is no newer than this one, so that some are done again.

    Without one, the oldest that is complete: to begin anew is not what was asked for.
    """
    choice = _newest(state, step)
    if choice.copy != SCRATCH:
        return replace(choice, why=f"{choice.why}, up to step {step}: the rest is done again")
    for oldest in _steps_of(state):
        choice = _newest(state, oldest)
        if choice.copy != SCRATCH:
            break
    why = f"no copy of step {max(step, 0)} or an older one is kept; the oldest there is serves"
    return replace(choice, why=f"{why}: {choice.why}, up to step {choice.copy.step}")


def _steps_of(state: State) -> list[Step]:
    """Of which somebody has something, the oldest first."""
    machines = state.machines.values()
    kept = [copy for m in machines for copy in (*m.copies, *m.backups, *m.local_disk)]
    return sorted({copy.step for copy in kept} | {entry.step for entry in state.published})


def _up_to(copies: Copies, step: Step) -> Copies:
    return replace(
        copies,
        local=tuple(copy for copy in copies.local if copy.step <= step),
        backups=tuple((name, copy) for name, copy in copies.backups if copy.step <= step),
        local_disk=tuple(copy for copy in copies.local_disk if copy.step <= step),
        published=tuple(copy for copy in copies.published if copy.step <= step),
    )


def only_spoiled(state: State) -> bool:
    """Whether a step could be restored, but only one from after the numbers went bad.

    Single copies of older steps may be left: they are no step that all ranks have.
    """
    if not state.spoiled or choose_from(state).copy != SCRATCH:
        return False
    return choose_from(replace(state, spoiled=[])).copy != SCRATCH


def _sound(state: State, copies: Copies) -> Copies:
    if not state.spoiled:
        return copies
    return replace(
        copies,
        local=tuple(c for c in copies.local if not _spoiled(state, c)),
        backups=tuple((m, c) for m, c in copies.backups if not _spoiled(state, c)),
        local_disk=tuple(c for c in copies.local_disk if not _spoiled(state, c)),
        published=tuple(p for p in copies.published if not _spoiled(state, p)),
    )


def _spoiled(state: State, copy: Copy | Published) -> bool:
    return any(copy.generation <= each.through and copy.step >= each.step for each in state.spoiled)


def copies_of(state: State) -> Copies:
    """What members hold for their own ranks, and what any machine that is well keeps for others.

    But not what was no use before: it would be fetched again and again. And of the size that the
    job has now: else a rank's number means another one.
    """
    every = _copies_of(state)
    if not state.sizes:
        return every
    return replace(
        every,
        local=tuple(c for c in every.local if _fits(state, c)),
        backups=tuple((m, c) for m, c in every.backups if _fits(state, c)),
        local_disk=tuple(c for c in every.local_disk if _fits(state, c)),
        published=tuple(p for p in every.published if _fits(state, p)),
    )


def _fits(state: State, copy: Copy | Published) -> bool:
    return state.job_of(copy) == state.job


def _copies_of(state: State) -> Copies:
    copies = Copies(
        local=tuple(
            copy
            for machine in state.members()
            if machine.node_rank is not None
            for copy in machine.copies
            if copy.rank in state.job.ranks_of(machine.node_rank)
        ),
        backups=tuple(
            (machine.machine, copy)
            for machine in state.machines.values()
            if _gives(machine)
            for copy in machine.backups
            if replace(copy, replicas=()) not in state.bad_copies
        )
        + tuple(
            (machine.machine, copy)
            for machine in state.machines.values()
            if gives_before_it_goes(state, machine)
            for copy in machine.copies
            if copy not in state.bad_copies
        ),
        local_disk=tuple(
            copy for machine in state.members() for copy in _own_on_disk(state, machine)
        ),
        published=tuple(state.published),
        homes=tuple(
            (Rank(rank), machine.machine)
            for machine in state.members()
            if machine.node_rank is not None and _gives(machine)
            for rank in state.job.ranks_of(machine.node_rank)
        ),
        compared=tuple(state.compared),
    )
    return _living(state, copies)


def history_goes_on(state: State) -> None:
    """The newest generation has done a step of its own: what older ones had beyond what it began
    with is none of the history any more.

    Its members have dropped that. A machine that was evicted and returns may not have.
    """
    through, step = Generation(state.last_started - 1), Step(state.restored + 1)
    older = [each for each in state.left if each.step < step and each.through < through]
    left = [*older, Spoiled(through=through, step=step)]
    if len(left) > LEFT_MAX:
        # Two as one: of generations that are long over, a little more is not restored.
        left[:2] = [Spoiled(through=left[1].through, step=left[0].step)]
    state.left = left


def _is_behind(state: State, copy: Copy) -> bool:
    """Whether training has left it behind. Only machines that return can have such copies."""
    if not any(each.returned for each in state.evictions):
        return False
    gone = (each for each in state.left if copy.generation <= each.through)
    return any(copy.step >= each.step for each in gone)


def _living(state: State, copies: Copies) -> Copies:
    return replace(
        copies,
        local=tuple(copy for copy in copies.local if not _is_behind(state, copy)),
        backups=tuple((m, copy) for m, copy in copies.backups if not _is_behind(state, copy)),
        local_disk=tuple(copy for copy in copies.local_disk if not _is_behind(state, copy)),
    )


def _within(copy: Published, bound: Step | None) -> bool:
    return bound is None or copy.step <= bound


def _order(copy: Published) -> tuple[Step, Generation]:
    return copy.step, copy.generation


def _choose_regrown(
    state: State, bound: Step | None = None, *, same_size: bool = False
) -> Choice | None:
    """The choice among steps of other sizes, up to `bound`; None if there is nothing.

    `same_size`: where nothing else is left, among steps of this size too, of which not every rank's
    own shard is there.
    """
    elastic = state.job.elastic
    if elastic is None or (same_size and (elastic.sharded or state.unequal)):
        return None
    published = [
        each
        for each in state.published
        if not _fits(state, each) and not _spoiled(state, each) and _within(each, bound)
    ]
    if elastic.sharded:
        newest = max(published, key=_order, default=None)
        return None if newest is None else _from_disk(state, newest)
    sources = _sources_by_step(state, published, same_size=same_size)
    homes = {
        Rank(rank): name for at, name in state.positions.items() for rank in state.job.ranks_of(at)
    }
    found = {}
    for key, those in sources.items():
        if not _within(key, bound):
            continue
        taken = take_all(state.job, state.job_of(key), homes, those)
        if taken is not None:
            found[key] = taken
    return _as_choice(state, homes, found) if found else None


def _from_disk(state: State, copy: Published) -> Choice:
    ranks, saved = state.job.world_size, state.job_of(copy).world_size
    why = (
        f"step {copy.step} is the newest one on disk; {saved} ranks wrote it, and {ranks} load it"
        " by way of torch's own format"
    )
    return Choice(copy=copy, local=0, fetch=(), local_disk=0, disk=ranks, why=why)


def _sources_by_step(
    state: State, published: list[Published], *, same_size: bool
) -> dict[Published, Sources]:
    """Where there are shards of each step that another number of replicas computed."""
    found: dict[Published, Sources] = {key: Sources(published=True) for key in published}
    for machine in state.machines.values():
        gives = _gives(machine) or gives_before_it_goes(state, machine)
        if machine.evicted and not gives:
            continue
        for copy in machine.copies if gives or machine.node_rank is not None else ():
            if _counts(state, copy, same_size=same_size):
                those = found.setdefault(_key(copy), Sources())
                those.own.setdefault(copy.rank, []).append(machine.machine)
        for copy in machine.backups if _gives(machine) else ():
            if not _counts(state, copy, same_size=same_size):
                continue
            those = found.setdefault(_key(copy), Sources())
            if not copy.replicas:
                those.kept.setdefault(copy.rank, []).append(machine.machine)
            elif _key(copy) in state.compared:
                members = tuple(ranks_in(copy.replicas))
                those.parts.setdefault(copy.rank, []).append((machine.machine, members))
    return found


def _counts(state: State, copy: Copy, *, same_size: bool) -> bool:
    bare = replace(copy, replicas=())
    if _spoiled(state, copy) or bare in state.bad_copies or _is_behind(state, copy):
        return False
    return same_size or not _fits(state, copy)


def _as_choice(
    state: State, homes: dict[Rank, MachineId], found: dict[Published, dict[Rank, Taken]]
) -> Choice:
    best = best_of(found)
    taken = found[best]
    local = sum(each.machine == homes.get(rank) for rank, each in taken.items())
    fetch = tuple(
        (rank, each.machine)
        for rank, each in taken.items()
        if each.machine is not None and (each.machine != homes.get(rank) or each.kept)
    )
    disk = sum(each.machine is None for each in taken.values())
    saved, now = state.job_of(best), state.job
    why = _why(
        best,
        {
            "in memory": len(taken) - len(fetch) - disk,
            "in a peer's memory": len(fetch),
            "on disk": disk,
        },
    )
    return Choice(
        copy=best,
        local=local,
        fetch=fetch,
        local_disk=0,
        disk=disk,
        why=f"{why}; {now.dp} replicas go on with the shards of {saved.dp}",
        joins={rank: each.joins for rank, each in taken.items() if each.joins},
        restores={rank: each.rank for rank, each in taken.items()},
    )


def _own_on_disk(state: State, machine: Machine) -> list[Copy]:
    """Of the ranks that the machine runs now: what others wrote on its disk is no use to it."""
    if machine.node_rank is None:
        return []
    ranks = state.job.ranks_of(machine.node_rank)
    return [c for c in machine.local_disk if c.rank in ranks and c not in state.bad_copies]


def safe_on_local_disks(state: State) -> Step:
    """The newest step that lies whole on the members' own disks; NO_STEP if there is none."""
    everywhere = copies_of(state).local_disk
    ranks = [Rank(rank) for rank in range(state.job.world_size)]
    return choose(ranks, Copies(local_disk=everywhere)).copy.step


def gives_before_it_goes(state: State, machine: Machine) -> bool:
    """An evicted machine that still speaks: the state of its ranks is in its memory.

    Only if its ranks are proven gone: what runs may write. And not if a look at the stacks has
    shown that others do not reach it: the controller still may.
    """
    look = state.judged
    if look is not None and any(whom == machine.machine for _, whom in look.unreached):
        return False
    still = machine.connected and not machine.released and not machine.lost
    stopped = machine.stopped_for >= state.generation and machine.shard_port > 0
    return bool(machine.evicted) and still and stopped


def _gives(machine: Machine) -> bool:
    """A member is started with the others: if its agent is away for a moment, it comes back."""
    there = machine.connected or machine.node_rank is not None
    return there and not machine.evicted and not machine.lost and machine.shard_port > 0
