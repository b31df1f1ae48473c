"""Which step a generation of another size restores, and whose shard each of its ranks gets. Pure.

Called by restore.py for steps that were computed with more or fewer data-parallel replicas than
there are now. Where the state is replicated, any rank that was alike will do, from the memory of
any machine that gives; as many different ones as there can be, since replicas differ in their
random numbers and their place in the data. Where it is sharded, only a published step serves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from everstep.core.sizes import alike
from everstep.model import JobSpec, MachineId, Published, Rank, Step, Value

AHEAD_MAX = 2
"""One replica may be this many steps ahead of others: then fewer steps are not worth that two
replicas go on with the random numbers and the data of one."""


class Sources(Value, frozen=True, kw_only=True):
    """Where shards of one step are, by the rank that saved them."""

    own: dict[Rank, list[MachineId]] = {}
    """In the memory of a machine that ran the rank."""
    kept: dict[Rank, list[MachineId]] = {}
    """Whole, in the memory of a machine that keeps its backup."""
    parts: dict[Rank, list[tuple[MachineId, tuple[Rank, ...]]]] = {}
    """Backups that are parts, and the ranks whose slices they need, their own among them."""
    published: bool = False


class Taken(NamedTuple):
    """Where one rank's state comes from."""

    rank: Rank
    """The one that saved it."""
    machine: MachineId | None
    """None: it is read from disk."""
    joins: tuple[tuple[Rank, MachineId], ...] = ()
    kept: bool = False
    """It is a backup, also if it lies on the machine that will run the rank."""


def take_all(
    new: JobSpec, old: JobSpec, homes: dict[Rank, MachineId], sources: Sources
) -> dict[Rank, Taken] | None:
    """For each rank of the new size where it gets its state; None: some find it nowhere.

    `homes`: the machine that will run each rank.
    """
    found: dict[Rank, Taken] = {}
    used: dict[Rank, None] = {}
    candidates = alike(new, old)
    for rank, others in candidates.items():  # first what lies there already
        here = homes.get(rank)
        mine = [o for o in others if o not in used and here in sources.own.get(o, [])]
        if mine:
            found[rank] = Taken(mine[0], here)
            used[mine[0]] = None
    for rank, others in candidates.items():
        if rank in found:
            continue
        ways = [way for other in others for way in _ways(other, homes.get(rank), sources)]
        if not ways:
            return None
        best = min(ways, key=lambda way: (way[1].rank in used, way[0]))[1]
        found[rank] = best
        used[best.rank] = None
    return dict(sorted(found.items()))


def _ways(rank: Rank, here: MachineId | None, sources: Sources) -> Iterator[tuple[int, Taken]]:
    """The nearest first."""
    for name in sources.own.get(rank, []):
        yield (0 if name == here else 1), Taken(rank, name)
    for name in sources.kept.get(rank, []):
        yield 2, Taken(rank, name, kept=True)
    for name, members in sources.parts.get(rank, []):
        joins = tuple((member, _slices_at(member, name, rank, sources)) for member in members)
        if all(machine is not None for _, machine in joins):
            named = tuple((member, where) for member, where in joins if where is not None)
            yield 3, Taken(rank, name, named, kept=True)
    if sources.published:
        yield 4, Taken(rank, None)


def _slices_at(
    member: Rank, part_at: MachineId, part_of: Rank, sources: Sources
) -> MachineId | None:
    """Who has this rank's slices of what several ranks hold alike."""
    if member == part_of:
        return part_at
    holders = [*sources.own.get(member, []), *sources.kept.get(member, [])]
    holders += [name for name, _ in sources.parts.get(member, [])]
    return holders[0] if holders else None


def best_of(found: dict[Published, dict[Rank, Taken]]) -> Published:
    """The newest, or one a little older that keeps more of the replicas' own state."""

    def order(key: Published) -> tuple[int, Step, int]:
        return len({taken.rank for taken in found[key].values()}), key.step, key.generation

    newest = max(found, key=lambda key: (key.step, key.generation))
    return max((key for key in found if key.step >= newest.step - AHEAD_MAX), key=order)
