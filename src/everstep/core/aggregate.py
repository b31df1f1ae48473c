"""What a look at all stacks means: who holds the others up, or that it is nobody's machine.

Pure; looking.py asks it about a stall, slowness.py about slow training, and the command about dumps
of any job. ByteRobust, section 5.1: alike stacks are one cluster, the dominant ones are healthy,
the smallest parallel group that contains the rest goes. Before that comes what is certain: what the
kernel and flight records say, and who does something else than wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec.structs import replace

from everstep.core.group_of import divides, even, filled, fullest, smallest
from everstep.core.groups import Layout
from everstep.core.holding import HALTS, STOPS, Nature, child_stopped, child_stuck, nature, stopped
from everstep.core.lasting import Lasts, lasts
from everstep.core.outlying import (
    Camp,
    Seen,
    Split,
    few_of,
    key_of,
    only,
    outliers,
    ranges_of_all,
    seen_in,
    split_of,
)
from everstep.core.recorded import recorded
from everstep.core.unreached import cut_off
from everstep.diagnosis.activity import Activity
from everstep.diagnosis.standing import Peer, Shape, Standstill
from everstep.looks import (
    Cluster,
    Fingerprint,
    LookResult,
    Ranges,
    Stack,
    Stood,
    in_words,
    joined,
    ranges_of,
    ranks_in,
    size_of,
)
from everstep.model import NodeRank, Rank, Value


class Taken(Value, frozen=True, kw_only=True):
    """What a look brought."""

    clusters: tuple[Cluster, ...]
    stacks: Mapping[Fingerprint, Stack]
    stood: tuple[Stood, ...] = ()
    peers: tuple[Peer, ...] = ()
    silent: tuple[NodeRank, ...] = ()
    """Machines that did not answer; of their ranks nothing else is known."""
    unreached: tuple[tuple[NodeRank, NodeRank], ...] = ()
    """(who tried, whom it could not reach)."""
    layout: Layout | None = None
    world_size: int
    ranks_per_machine: int = 1

    @property
    def machines(self) -> int:
        """Of the job."""
        return -(-self.world_size // self.ranks_per_machine)

    def machines_of(self, ranks: Ranges) -> tuple[NodeRank, ...]:
        """Where ranks run."""
        per = self.ranks_per_machine
        return tuple(sorted({NodeRank(rank // per) for rank in ranks_in(ranks)}))

    def ranks_of(self, machines: Iterable[NodeRank]) -> Ranges:
        """The ranks of machines."""
        per = self.ranks_per_machine
        return ranges_of(rank for at in machines for rank in range(at * per, (at + 1) * per))


class Conclusion(Value, frozen=True, kw_only=True):
    """What it means."""

    result: LookResult
    """MACHINES, CODE, NOTHING or WORKS."""
    why: str
    """One sentence, with counts."""
    ranks: tuple[Rank, ...] = ()
    """Who holds the others up, or the outliers."""
    machines: tuple[NodeRank, ...] = ()
    """Who goes for it, with all of a group if it goes as a whole; only with MACHINES."""
    group: str = ""
    """The parallel group: "pp 24-31"."""
    lasts: Lasts = Lasts.NO_TIME
    """How long what they do may take and yet be well."""


class _View(Value, frozen=True, kw_only=True):
    """A look, read."""

    taken: Taken
    seen: tuple[Seen, ...]
    split: Split
    still: Standstill | None
    """What flight records say."""


def conclude(taken: Taken) -> Conclusion:
    """What one look means. Whether it stands still, a second one has to say."""
    seen = tuple(seen_in(taken.clusters, taken.stacks))
    view = _View(
        taken=taken,
        seen=seen,
        split=split_of(seen),
        still=recorded(taken.stood, taken.peers, taken.world_size),
    )
    found = next((found for rule in _RULES if (found := rule(view)) is not None), _nobody(view))
    return replace(found, lasts=lasts(seen, taken.stacks, ranges_of(found.ranks)))


def agree(earlier: Conclusion, later: Conclusion) -> bool:
    """Whether two looks in a row say the same: the same result, and nobody is named anew."""
    return (
        earlier.result is later.result
        and set(later.ranks) <= set(earlier.ranks)
        and set(later.machines) <= set(earlier.machines)
    )


def flagged(taken: Taken) -> tuple[str, ...]:
    """Of slow training: the parallel groups with the largest share of outliers; all if several."""
    split = split_of(seen_in(taken.clusters, taken.stacks))
    apart = split.holding if split.few else outliers(split, taken.layout)
    return fullest(taken.layout, _ranks(apart)) if taken.layout is not None else ()


# --- rules, the most certain first ----------------------------------------------------------------


def _unseen(view: _View) -> Conclusion | None:
    """Nobody shows anything."""
    known = view.still is not None or any(stopped(each) for each in view.seen)
    if known or view.split.total or view.taken.silent:
        return None
    reasons = Counter(each.cluster.posture.rank.why_none for each in view.seen)
    reason = reasons.most_common(1)[0][0] if reasons else ""
    return _nothing("no stack could be taken" + (f": {reason}" if reason else ""))


def _different(view: _View) -> Conclusion | None:
    """Ranks called different things as the same collective."""
    still = view.still
    if still is None or still.shape is not Shape.DIFFERENT or not (still.other and still.reference):
        return None
    (one, call), (two, usual) = still.other, still.reference
    return _code(
        f"ranks called different things as collective {still.seq} of group"
        f" {still.group or '0'}: rank {one} {call}, rank {two} {usual}",
        ranges_of(still.ranks),
    )


def _stopped(view: _View) -> Conclusion | None:
    """Processes that cannot go on, machines that do not answer."""
    many = {
        key_of(camp.doing) for camp in view.split.holding if not few_of(camp.size, view.split.total)
    }  # all write a checkpoint, say: then some are always asleep in the kernel
    clauses = [
        (each, clause)
        for each in view.seen
        if (clause := stopped(each, HALTS if key_of(each.doing) in many else STOPS))
    ]
    silent = view.taken.ranks_of(view.taken.silent)
    if not clauses and not silent:
        return None
    said = [_says(each, clause) for each, clause in clauses[:3]]
    if silent:
        said.append(f"the {_machines(view.taken.silent)} of {_who(silent)} did not answer")
    ranks = joined((*ranges_of_all(e for e, _ in clauses), *silent))
    return _definite(view, ranks, " and ".join(said))


def _late(view: _View) -> Conclusion | None:
    """By flight records some have not called, or not finished, what all others wait in."""
    still = view.still
    if still is None or still.shape not in {Shape.LATE, Shape.UNFINISHED}:
        return None
    late = set(still.ranks)
    seen = only(view.seen, late.__contains__)
    what = f"collective {still.seq} of group {still.group or '0'} ({still.call or 'unknown'})"
    if still.shape is Shape.UNFINISHED:
        text = f"all ranks of it called {what}, and only {_who(ranges_of(late))} did not finish it"
        return _definite(view, ranges_of(late), text)
    busy = [each for each in seen if not each.doing.waits]
    if seen and not busy:
        return None  # what they wait for themselves is not on record
    text = f"{len(still.waiting)} ranks wait in {what}, which {_who(ranges_of(late))} did not call"
    return _judged(view, busy, text, sure=True) or _definite(view, ranges_of(late), text)


def _circle(view: _View) -> Conclusion | None:
    """Ranks wait for each other in different groups. Who has no record may be who they wait for."""
    still = view.still
    if still is None or still.shape is not Shape.CIRCLE:
        return None
    if not _all_recorded(view):
        return None
    text = "ranks wait for each other in different groups: the program uses them in another order"
    return _code(f"{text}; {_who(ranges_of(still.ranks))} is late in one and waits in another")


def _all_recorded(view: _View) -> bool:
    """Whether every rank has a flight record."""
    known = {rank for stood in view.taken.stood for rank in ranks_in(stood.ranks)}
    return len(known) >= view.taken.world_size


def _held(view: _View) -> Conclusion | None:
    """Few do something else than wait."""
    if not view.split.few:
        return None
    if _follows_layout(view, _ranks(view.split.holding)):
        return _layout(view, view.split.holding)
    return _judged(view, _all(view.split.holding), "", sure=False)


def _many(view: _View) -> Conclusion | None:
    """Most, or all, do something else than wait."""
    split = view.split
    if not split.holds or split.few:
        return None
    natures = Counter[Nature]()
    for each in _all(split.holding):
        natures[nature(each, view.taken.stacks)] += each.size
    most, count = natures.most_common(1)[0]
    if most is Nature.UNSURE or count * 2 <= split.holds:
        return None
    first = next(e for e in _all(split.holding) if nature(e, view.taken.stacks) is most)
    text = f"{split.holds} of {split.total} ranks do not wait for others ({first.doing})"
    if most is Nature.BUSY:
        return Conclusion(result=LookResult.WORKS, why=text)
    if most is Nature.SOFTWARE:
        return _code(text)
    return _nothing(f"{text}: so many at once are no machine's fault")


def _ahead(view: _View) -> Conclusion | None:
    """Few wait in what most have not called."""
    still = view.still
    if still is None or still.shape is not Shape.AHEAD or view.split.few:
        return None
    return _code(
        f"only {_who(ranges_of(still.ranks))} of {still.size} ranks called collective {still.seq}"
        f" of group {still.group or '0'} ({still.call or 'unknown'}): uneven data, or another way"
        " in the code",
        ranges_of(still.ranks),
    )


def _cut_off(view: _View) -> Conclusion | None:
    """Machines that others cannot reach."""
    taken = view.taken
    cut = cut_off(taken.unreached, taken.machines)
    if not cut:
        return None
    text = f"the {_machines(cut)} of {_who(taken.ranks_of(cut))} cannot be reached by the others"
    return _definite(view, taken.ranks_of(cut), text)


def _child_of_waiting(view: _View) -> Conclusion | None:
    """A child of a rank that waits like all others cannot go on: it is all there is."""
    told = [(each, clause) for each in view.seen if (clause := child_stopped(each))]
    if not told:
        return None
    return _definite(view, ranges_of_all(e for e, _ in told), _says(*told[0]))


def _joined(view: _View) -> Conclusion | None:
    """Few ranks wait for nobody who is late, and all others wait for them: it is their transport.

    Where all have joined the same, nobody differs.
    """
    still = view.still
    if still is None or still.shape not in {Shape.JOINED, Shape.PAIR}:
        return None
    ranks = ranges_of(still.ranks)
    if not ranks or not few_of(len(still.ranks), view.split.total) or not _all_recorded(view):
        return None
    where = "a send and a receive" if still.shape is Shape.PAIR else f"{still.call or 'unknown'}"
    text = f"all others wait for {_who(ranks)}, which joined {where} and do not finish it"
    return _group(view, ranks, text)


def _outliers(view: _View) -> Conclusion | None:
    """Few show other stacks than most."""
    camps = outliers(view.split, view.taken.layout)
    ranks = _ranks(camps)
    if not camps:
        return None
    if _follows_layout(view, ranks):
        return _layout(view, camps)
    text = f"{_who(ranks)} {_is(ranks)} {_does(camps[0])}"
    if len(camps) > 1:
        text += " and " + ", ".join(_does(camp) for camp in camps[1:3])
    text += f", and {view.split.total - size_of(ranks)} of {view.split.total} ranks elsewhere"
    plain = all(c.doing.activity in {Activity.COLLECTIVE, Activity.START} for c in camps)
    if plain and not filled(view.taken.layout, ranks):
        return _code(f"{text}: they went another way in the code", ranks)
    return _group(view, ranks, text)


_RULES: tuple[Callable[[_View], Conclusion | None], ...] = (
    _unseen,
    _different,
    _stopped,
    _late,
    _circle,
    _held,
    _many,
    _ahead,
    _cut_off,
    _child_of_waiting,
    _joined,
    _outliers,
)


# --- what follows ---------------------------------------------------------------------------------


def _judged(view: _View, seen: Sequence[Seen], text: str, *, sure: bool) -> Conclusion | None:
    """What few ranks that do not wait are busy with; None if that tells nothing."""
    stacks = view.taken.stacks
    by: dict[Nature, list[Seen]] = {}
    for each in seen:
        by.setdefault(nature(each, stacks), []).append(each)
    certain = [Nature.STUCK, Nature.BUSY, Nature.SOFTWARE]
    kind = next((one for one in certain if one in by), Nature.UNSURE)
    if kind not in by or (kind is Nature.UNSURE and not sure):
        return None
    ranks = ranges_of_all(by[kind])
    first = by[kind][0]
    text = f"{text}; " if text else ""
    text += f"{_who(ranks)} {_is(ranks)} {first.doing}"
    if kind is Nature.STUCK and (clause := child_stuck(first, stacks)):
        text += f", {clause}"
    if kind is Nature.BUSY:
        return Conclusion(
            result=LookResult.WORKS, why=text + _waits(view, ranks), ranks=tuple(ranks_in(ranks))
        )
    if kind is Nature.SOFTWARE:
        return _code(text + _waits(view, ranks), ranks)
    return _definite(view, ranks, text)


def _definite(view: _View, ranks: Ranges, text: str) -> Conclusion:
    """The machines of these ranks go, unless they are too many to be at fault."""
    machines = view.taken.machines_of(ranks)
    why = text + _waits(view, ranks)
    if not few_of(len(machines), view.taken.machines):
        return _nothing(
            f"{why}: {len(machines)} of {view.taken.machines} machines at once are too"
            " many to be broken by themselves"
        )
    return Conclusion(
        result=LookResult.MACHINES,
        why=why,
        ranks=tuple(ranks_in(ranks)),
        machines=machines,
    )


def _group(view: _View, ranks: Ranges, text: str) -> Conclusion:
    """The smallest parallel group of these ranks goes, or the one machine that has them all."""
    taken = view.taken
    alone = taken.machines_of(ranks)
    machines, label = alone, ""
    if len(alone) > 1 and taken.layout is not None and divides(taken.layout):
        group = smallest(taken.layout, alone)
        if group is None:
            return _nothing(f"{text}: no parallel group has most of them")
        machines, label = tuple(sorted(group.machines)), group.label
        text += f": the smallest group that has them is {label}"
    elif not few_of(len(alone), taken.machines):
        return _nothing(f"{text}: they are on {len(alone)} of {taken.machines} machines")
    return Conclusion(
        result=LookResult.MACHINES,
        why=text,
        ranks=tuple(ranks_in(ranks)),
        machines=machines,
        group=label,
    )


def _nobody(view: _View) -> Conclusion:
    """Nobody can be named."""
    split = view.split
    if len(split.camps) == 1:
        return _nothing(f"all {split.total} ranks are {_does(split.camps[0])}")
    first = ", ".join(f"{camp.size} {_does(camp)}" for camp in split.camps[:3])
    return _nothing(f"nobody is an outlier among {split.total} ranks: {first}")


def _follows_layout(view: _View, ranks: Ranges) -> bool:
    """Whether every machine, or every pipeline, has as many of these ranks and others beside."""
    taken = view.taken
    per = Counter(rank // taken.ranks_per_machine for rank in ranks_in(ranks))
    same = len(set(per.values())) == 1 and len(per) == taken.machines > 1
    if same and next(iter(per.values())) < taken.ranks_per_machine:
        return True
    return taken.layout is not None and any(
        even(taken.layout, ranks, kind) for kind in ("pp", "tp")
    )


def _layout(view: _View, camps: Sequence[Camp]) -> Conclusion:
    return _nothing(
        f"{sum(camp.size for camp in camps)} of {view.split.total} ranks are {_does(camps[0])}, as"
        " many in every part of the job: that follows the layout or the program"
    )


def _code(why: str, ranks: Ranges = ()) -> Conclusion:
    return Conclusion(result=LookResult.CODE, why=why, ranks=tuple(ranks_in(ranks)))


def _nothing(why: str) -> Conclusion:
    return Conclusion(result=LookResult.NOTHING, why=why)


# --- words ----------------------------------------------------------------------------------------


def _all(camps: Iterable[Camp]) -> list[Seen]:
    return [each for camp in camps for each in camp.seen]


def _ranks(camps: Iterable[Camp]) -> Ranges:
    return ranges_of_all(_all(camps))


def _who(ranks: Ranges) -> str:
    return f"{'rank' if size_of(ranks) == 1 else 'ranks'} {in_words(ranks)}"


def _says(each: Seen, clause: str) -> str:
    ranks = ranges_of_all([each])
    verb, _, rest = clause.partition(" ")
    plural = {"is": "are", "has": "have"}
    return f"{_who(ranks)} {verb if size_of(ranks) == 1 else plural[verb]} {rest}"


def _is(ranks: Ranges) -> str:
    return "is" if size_of(ranks) == 1 else "are"


def _machines(machines: Sequence[NodeRank]) -> str:
    return "machine" if len(machines) == 1 else f"{len(machines)} machines"


def _does(camp: Camp) -> str:
    return f"{camp.doing}" if camp.doing.activity is not Activity.UNSEEN else "in an unknown stack"


def _waits(view: _View, ranks: Ranges = ()) -> str:
    """What all others do meanwhile."""
    named = set(ranks_in(ranks))
    split = split_of(only(view.seen, lambda rank: rank not in named)) if named else view.split
    if not split.waiting:
        return ""
    where = f" {_does(split.waiting[0])}"
    if len(split.waiting) > 1:
        where = f", {split.waiting[0].size} of them{where}"
    return f", while {_others(split.waits, split.total + split.dark)}{where}"


def _others(some: int, total: int) -> str:
    """Of the others, so many wait."""
    if some < total:
        return f"{some} of {total} other ranks wait"
    return f"all {total} others wait" if total > 1 else "the other rank waits"
