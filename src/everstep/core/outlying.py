"""Which ranks of a look do the same, which do otherwise than most, and who waits.

For aggregate.py. Everything is done on clusters, of which there are few however many ranks a job
has. Ranks with different fingerprints may do the same: what counts is what they wait in and which
function of the user's code led there.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from everstep.core.groups import Layout
from everstep.core.roles import role
from everstep.diagnosis.activity import HIDES, WAITS, Activity, Doing, doing
from everstep.diagnosis.findings import Place
from everstep.diagnosis.frames import Dump
from everstep.looks import (
    NO_STACK,
    Cluster,
    Fingerprint,
    Ranges,
    Shown,
    Stack,
    joined,
    ranges_of,
    ranks_in,
    size_of,
)
from everstep.model import Rank, Value

FEW = 0.25
"""More ranks than this share are no outliers, whatever they do."""
MOST = 0.7
"""What the dominant camps have together at least."""
LARGEST = 0.4
"""Without a camp of this share there is nobody to compare with."""
HALF = 0.5
_LINE = re.compile(r":\d+\)$")
_SPINS = re.compile(r"::|^(p?nccl|rccl|cu|hip|MPI_|uc[pt]_|hcoll_|ompi_|opal_|\?)")
_NOWHERE = Place(file="", line=0, text="")
_ACROSS = WAITS | {Activity.SYNC, Activity.BACKWARD}
_NAPS = re.compile(r"(hrtimer_|do_|common_)?nanosleep\w*|common_nsleep\w*|hrtimer_sleep\w*")
_WHOLES = frozenset(
    {Activity.EVALUATE, Activity.SAVE, Activity.LOAD, Activity.COMPILE, Activity.LOADER}
)
"""What a sleep may be a part of."""

Key = tuple[str, ...]


class Seen(Value, frozen=True, kw_only=True):
    """One cluster, and what its ranks do."""

    cluster: Cluster
    doing: Doing
    size: int

    @property
    def state(self) -> str:
        """The kernel's letter."""
        return self.cluster.posture.rank.state

    @property
    def wchan(self) -> str:
        """The function of the kernel they wait in."""
        return self.cluster.posture.rank.wchan


class Camp(Value, frozen=True, kw_only=True):
    """Clusters that do the same."""

    doing: Doing
    seen: tuple[Seen, ...]
    size: int

    @property
    def ranks(self) -> Ranges:
        """All of them."""
        return ranges_of_all(self.seen)


class Split(Value, frozen=True, kw_only=True):
    """How the ranks that show something divide."""

    waiting: tuple[Camp, ...]
    """Largest first."""
    holding: tuple[Camp, ...]
    """Those that do something else."""
    dark: int
    """Ranks that show nothing."""

    @property
    def waits(self) -> int:
        return sum(camp.size for camp in self.waiting)

    @property
    def holds(self) -> int:
        return sum(camp.size for camp in self.holding)

    @property
    def total(self) -> int:
        return self.waits + self.holds

    @property
    def few(self) -> bool:
        """Whether those that do something else are few enough to be outliers."""
        return 0 < self.holds < self.total and few_of(self.holds, self.total)

    @property
    def camps(self) -> tuple[Camp, ...]:
        return tuple(sorted((*self.waiting, *self.holding), key=_by_size))


def few_of(some: int, total: int) -> bool:
    """Whether these are few of all."""
    return some <= max(1, int(FEW * total))


def seen_in(clusters: Iterable[Cluster], stacks: Mapping[Fingerprint, Stack]) -> list[Seen]:
    """Each cluster with what its ranks do."""
    done: dict[Shown, Doing] = {}
    found = []
    for cluster in clusters:
        shown = cluster.posture.rank
        if shown not in done:
            done[shown] = doing_of(shown, stacks)
        found.append(Seen(cluster=cluster, doing=done[shown], size=size_of(cluster.ranks)))
    return found


def doing_of(shown: Shown, stacks: Mapping[Fingerprint, Stack]) -> Doing:
    """What a process does, by its stack and by the function of the kernel that it waits in.

    A sleep has no frame of its own in Python, and shows only there. So does a lock, but a process
    that waits for memory to change (futex) may as well wait for other ranks.
    """
    stack = stacks.get(shown.stack) if shown.stack != NO_STACK else None
    if stack is None:
        return Doing(activity=Activity.UNSEEN, call=shown.stack)
    done = doing(Dump(place=_NOWHERE, threads=stack.threads))
    if not _NAPS.fullmatch(shown.wchan) or shown.state.startswith("R"):
        return done
    if done.activity is Activity.CODE:
        return msgspec.structs.replace(done, activity=Activity.SLEEP)
    if done.activity in _WHOLES and done.part is None:
        return msgspec.structs.replace(done, part=Activity.SLEEP)
    return done


def key_of(done: Doing) -> Key:
    """Equal for those that do the same. Functions below Python change while a rank spins."""
    call = "" if _SPINS.search(done.call) else done.call
    return (done.activity, done.part or "", call, _LINE.sub(")", done.at))


def token_of(shown: Shown, stacks: Mapping[Fingerprint, Stack]) -> Key:
    """Other for a process that comes further. One that waits for others spins in many functions."""
    done = doing_of(shown, stacks)
    return key_of(done) if done.activity in _ACROSS else (shown.stack,)


def camps_of(seen: Iterable[Seen]) -> list[Camp]:
    """Those that do the same together, the largest first."""
    camps: dict[Key, list[Seen]] = defaultdict(list)
    for each in seen:
        camps[key_of(each.doing)].append(each)
    found = [_camp(members) for members in camps.values()]
    return sorted(found, key=_by_size)


def _camp(seen: Sequence[Seen]) -> Camp:
    first = min(seen, key=lambda each: each.cluster.ranks)
    return Camp(doing=first.doing, seen=tuple(seen), size=sum(each.size for each in seen))


def _by_size(camp: Camp) -> tuple[int, Ranges]:
    return (-camp.size, min(each.cluster.ranks for each in camp.seen))


def split_of(seen: Iterable[Seen]) -> Split:
    """Who waits for others and who does not, as far as stacks show it.

    The same place on many ranks may be a collective that a stack does not show. A stack of which
    the text is missing counts as such a place.
    """
    camps = camps_of(seen)
    dark = [c for c in camps if c.doing.activity is Activity.UNSEEN and not c.doing.call]
    shown = [c for c in camps if c not in dark]
    total = sum(camp.size for camp in shown)
    waiting = [c for c in shown if c.doing.activity in WAITS]
    hidden = [c for c in shown if c.doing.activity in HIDES or c.doing.activity is Activity.UNSEEN]
    holding = [c for c in shown if c not in waiting and c not in hidden]
    for camp in hidden:
        alike = camp.size > 1 and not few_of(camp.size, total)
        (waiting if alike or not (waiting or holding) else holding).append(camp)
    return Split(
        waiting=tuple(sorted(waiting, key=_by_size)),
        holding=tuple(sorted(holding, key=_by_size)),
        dark=sum(camp.size for camp in dark),
    )


def dominant(camps: Sequence[Camp], total: int) -> tuple[Camp, ...]:
    """The camps that are taken for healthy; none if there is no majority.

    From the largest until they have most of the ranks, with all that are as large as the last of
    these, and every other that is not small.
    """
    if not camps or camps[0].size < LARGEST * total:
        return ()
    got = 0
    for camp in camps:
        if got >= MOST * total:
            break
        got, least = got + camp.size, camp.size
    return tuple(c for c in camps if c.size >= least or not few_of(c.size, total))


def outliers(split: Split, layout: Layout | None) -> tuple[Camp, ...]:
    """What the others do, few ranks in all; none if there are none or there is no majority.

    Stages of a pipeline may wait in different places, each in its own. So ranks are compared with
    all others and with those of the same stage, and what leaves fewer outliers is right.
    """
    found = _apart(split.camps, split.total)
    staged = _apart_in_stages(split, layout)
    if staged is None or not (found or staged):
        return found
    return min(found or staged, staged, key=_count)


def _count(camps: Sequence[Camp]) -> int:
    return sum(camp.size for camp in camps)


def _apart(camps: Sequence[Camp], total: int) -> tuple[Camp, ...]:
    healthy = dominant(camps, total)
    rest = tuple(camp for camp in camps if camp not in healthy) if healthy else ()
    return rest if few_of(_count(rest), total) else ()


def _apart_in_stages(split: Split, layout: Layout | None) -> tuple[Camp, ...] | None:
    """Ranks that do otherwise than more than half of their stage; None if that tells nothing."""
    stages = _stages(layout)
    if stages is None:
        return None
    stride, size = stages
    at = {
        key_of(camp.doing): Counter(rank // stride % size for rank in ranks_in(camp.ranks))
        for camp in split.camps
    }
    usual: set[tuple[Key, int]] = set()
    for stage in range(size):
        key = max(at, key=lambda key: at[key][stage])
        if at[key][stage] <= HALF * sum(counts[stage] for counts in at.values()):
            return None
        usual.add((key, stage))
    rest = []
    for camp in split.camps:
        key = key_of(camp.doing)
        odd = {stage for stage in at[key] if (key, stage) not in usual}
        if odd:
            rest.append(_camp(_of_stages(camp, stages, odd)))
    return tuple(rest) if few_of(_count(rest), split.total) else None


def _of_stages(camp: Camp, stages: tuple[int, int], wanted: set[int]) -> list[Seen]:
    stride, size = stages
    return only(camp.seen, lambda rank: rank // stride % size in wanted)


def _stages(layout: Layout | None) -> tuple[int, int] | None:
    """(stride, size) of the pipeline's dimension."""
    shapes = layout.shapes if layout is not None else ()
    found = [s.factors[0] for s in shapes if role(s.name) == "pp" and len(s.factors) == 1]
    return found[0] if found else None


def only(seen: Iterable[Seen], keeps: Callable[[Rank], bool]) -> list[Seen]:
    """The parts of clusters whose ranks are meant."""
    found = []
    for each in seen:
        ranks = ranges_of(rank for rank in ranks_in(each.cluster.ranks) if keeps(rank))
        if ranks:
            cluster = msgspec.structs.replace(each.cluster, ranks=ranks)
            found.append(Seen(cluster=cluster, doing=each.doing, size=size_of(ranks)))
    return found


def ranges_of_all(seen: Iterable[Seen]) -> Ranges:
    """The ranks of several clusters as pairs."""
    return joined(pair for each in seen for pair in each.cluster.ranks)
