"""Who holds up all others: compares how long ranks compute in a step with those that do the same.

A part of intake.py, which gives it what machines report and asks it once a second. In synchronous
training a step takes all ranks equally long; what each computes in it does not.

Ranks do the same work if the layout says so: pipeline stages, parts of a sequence and experts may
be uneven, so ranks are compared along data and tensor parallelism alone. Where nothing is known of
the layout, or none does the same, a rank is compared with its own past, by its share of what
all compute. Before somebody
is named, a difference must be a tenth of a step, stand out from the noise between ranks and from
that of the rank itself, be his machine's alone, and last. One who is named so again on another
machine is never told again: then it goes with the rank's work (it logs, say), not with a machine.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Hashable
from typing import NamedTuple

import msgspec

from everstep.core.groups import Layout
from everstep.core.roles import role
from everstep.events import MachineProgress
from everstep.model import NO_GENERATION, Generation, MachineId, Rank, Seconds, Step
from everstep.sightings import StragglerSeen

COSTS = 0.10
"""Of each step: less is not worth a restart (Greyhound, ATC '25, calls 10 % slow)."""
LASTS_S: Seconds = 10.0
LASTS_STEPS = 20
"""So long it must be there, and so long be gone to be over: as many steps as a median is made of,
so that first and last look have no step in common."""
PEER_SPREADS = 5.0
"""Standard deviations among those that do the same, from their median absolute deviation."""
OWN_SPREADS = 5.0
"""Times what a rank's share wobbles by."""
FEW = 1.5
"""Times that, where peers are too few to show their own spread."""
PEERS_MIN = 4
"""Fewer than this show no spread."""
ALONE = 0.5
"""The worst of any other machine is below this part of it: else it is the work, or a group."""
STAYS = 0.8
OVER = 0.5
"""A suspicion stays above this part of what it takes to begin, and who was told is still slow above
that one."""
KNOWN = 20
"""So many looks at a rank before it is judged."""
LEARN_STEPS = 2
"""At least so many steps between two looks that what is usual is learned from: else they show the
same steps, and their noise is not seen."""
WEIGHT = 0.05
FASTER = 0.2
"""Of the newest such look in what is usual, and in how far a rank is from that if it is further."""
TAKES = 30
"""The median of so many looks at the time per step is what a step takes."""
WORSE = 0.10
"""Who was told is told again if it costs so much more of a step."""


class Usual(msgspec.Struct):
    """One rank's share: what it computes over the median of those that it is compared with."""

    share: float
    wobble: float = 0.0
    """How far it is from that at looks where it is far: it grows faster than it shrinks."""
    looks: int = 1

    def learn(self, share: float) -> None:
        self.looks = min(self.looks + 1, KNOWN)
        weight = max(WEIGHT, 1 / self.looks)
        away = abs(share - self.share)
        self.wobble += (max(FASTER, weight) if away > self.wobble else weight) * (
            away - self.wobble
        )
        self.share += weight * (share - self.share)


class Worker(NamedTuple):
    """One rank's newest median."""

    rank: Rank
    machine: MachineId
    seconds: Seconds


class Excess(NamedTuple):
    """How much longer than it should a rank computes."""

    worker: Worker
    should_s: Seconds
    costs: float
    """In parts of a step."""
    needed: float
    """The same, to be suspected."""
    itself: bool
    """Compared with its own past."""


class _Look(NamedTuple):
    """One look at all ranks."""

    takes_s: Seconds
    """What a step takes."""
    learning: bool
    """Steps were finished since what was usual was noted last."""
    itself: bool
    """Ranks are compared with their own past."""
    watched: frozenset[Rank | None]
    """Who is suspected, or was told: what is usual for them is not learned now."""


class Suspect(NamedTuple):
    """Who may be the one, and since when; or since when nobody is."""

    rank: Rank | None
    at: Seconds
    step: Step


class Stragglers:
    """All ranks' work of the newest generation; what is usual outlives a generation."""

    def __init__(self) -> None:
        self._generation: Generation = NO_GENERATION
        self._computes: dict[MachineId, tuple[Worker, ...]] = {}
        self._step = Step(-1)
        """When it was learned last."""
        self._takes: deque[Seconds] = deque(maxlen=TAKES)
        self._usual: dict[Rank, Usual] = {}
        self._layout: Layout | None = None
        self._work_of: dict[Rank, Hashable] = {}
        self._suspect: Suspect | None = None
        self._told: StragglerSeen | None = None
        self._named: dict[Rank, MachineId] = {}

    def take(self, progress: MachineProgress) -> None:
        """What a machine says of its ranks now."""
        if progress.generation < self._generation:
            return
        if progress.generation > self._generation:
            self._generation = progress.generation
            self._computes.clear()
            self._takes.clear()
            self._suspect = self._told = None
        self._computes[progress.machine] = tuple(
            Worker(each.rank, progress.machine, each.seconds) for each in progress.computes
        )

    def judge(
        self, layout: Layout | None, step: Step, step_s: Seconds | None, now: Seconds
    ) -> StragglerSeen | None:
        """Once a second, when all have reported: what is new. `step` is finished by all."""
        if layout != self._layout:  # what a rank's share was is of those it was compared with
            self._layout = layout
            self._work_of.clear()
            self._usual.clear()
            self._suspect = None
        if step_s is None or step_s <= 0:
            return None
        self._takes.append(step_s)
        takes_s = statistics.median(self._takes)
        learning = not self._step <= step < self._step + LEARN_STEPS
        self._step = step if learning else self._step
        watched = frozenset(each.rank for each in (self._suspect, self._told) if each is not None)
        alike, alone = self._alike()
        look = _Look(takes_s, learning, itself=False, watched=watched)
        worst = self._worst_of(alone, look._replace(itself=True))
        for workers in alike:
            worst += self._worst_of(workers, look)
        found = self._outstanding(worst)
        self._suspect = self._suspicion(found, step, now)
        lasts = now - self._suspect.at >= LASTS_S and step - self._suspect.step >= LASTS_STEPS
        return self._tell(found) if lasts else None

    def _alike(self) -> tuple[list[list[Worker]], list[Worker]]:
        """Those that do the same work, two at least; and those that none is like."""
        by_work: dict[Hashable, list[Worker]] = defaultdict(list)
        alone: list[Worker] = []
        for workers in self._computes.values():
            for worker in workers:
                place = by_work[self._work(worker.rank)] if self._layout is not None else alone
                place.append(worker)
        alone += [workers[0] for workers in by_work.values() if len(workers) == 1]
        return [workers for workers in by_work.values() if len(workers) > 1], alone

    def _work(self, rank: Rank) -> Hashable:
        known = self._work_of.get(rank)
        if known is None and self._layout is not None:
            known = self._work_of[rank] = work_of(self._layout, rank)
        return known

    def _worst_of(self, workers: list[Worker], look: _Look) -> list[Excess]:
        """The worst rank of each machine here, and those that are watched, if they are slower than
        they should be; learn of all.
        """
        expected = [self._share(worker.rank) if look.itself else 1.0 for worker in workers]
        paces = [w.seconds / share for w, share in zip(workers, expected, strict=True)]
        middle, spread = _usual(workers, paces)
        if middle <= 0:
            return []
        worst: dict[MachineId, Excess] = {}
        found: list[Excess] = []
        for worker, share, pace in zip(workers, expected, paces, strict=True):
            usual = self._usual.get(worker.rank)
            if usual is None:
                self._usual[worker.rank] = Usual(worker.seconds / middle)
                continue
            costs = share * (pace - middle) / look.takes_s
            own = usual.wobble * middle * OWN_SPREADS * (1.0 if spread else FEW)
            noise = max(PEER_SPREADS * spread * share, own)
            needed = max(COSTS, noise / look.takes_s)
            known = usual.looks >= KNOWN
            watched = worker.rank in look.watched
            if look.learning and not (known and (watched or costs >= needed)):
                usual.learn(worker.seconds / middle)
            best = worst.get(worker.machine)
            if not known or costs <= 0 or not (watched or best is None or best.costs < costs):
                continue
            excess = Excess(worker, share * middle, costs, needed, look.itself)
            if watched:
                found.append(excess)
            else:
                worst[worker.machine] = excess
        return found + list(worst.values())

    def _share(self, rank: Rank) -> float:
        usual = self._usual.get(rank)
        return 1.0 if usual is None else usual.share

    def _outstanding(self, worst: list[Excess]) -> Excess | None:
        """The one that stands out, on a machine that does so alone."""
        worst.sort(key=lambda each: (-each.costs, each.worker.rank))
        if not worst:
            return None
        first = worst[0]
        others = (each for each in worst if each.worker.machine != first.worker.machine)
        second = next(others, None)
        if second is not None and second.costs > ALONE * first.costs:
            return None
        on_it = [each for each in worst if each.worker.machine == first.worker.machine]
        slow = [each for each in on_it if each.costs >= self._stays(each.worker.rank) * each.needed]
        slow.sort(key=lambda each: not self._suspects(each.worker.rank))
        return slow[0] if slow else None

    def _suspects(self, rank: Rank) -> bool:
        return self._suspect is not None and self._suspect.rank == rank

    def _stays(self, rank: Rank) -> float:
        """So much of what is needed is enough for this rank."""
        if self._told is not None and self._told.rank == rank:
            return OVER
        return STAYS if self._suspects(rank) else 1.0

    def _suspicion(self, found: Excess | None, step: Step, now: Seconds) -> Suspect:
        rank = None if found is None else found.worker.rank
        if self._suspect is not None and self._suspect.rank == rank:
            return self._suspect
        return Suspect(rank, now, step)

    def _tell(self, found: Excess | None) -> StragglerSeen | None:
        """What has lasted, if it is not what was told."""
        told = self._told
        if found is None:
            self._told = None
            return None if told is None else StragglerSeen(generation=self._generation, rank=None)
        worker = found.worker
        same = told is not None and told.machine == worker.machine
        if same and told is not None and found.costs < told.costs + WORSE:
            return None
        if not same and found.costs < found.needed:
            return None
        if self._named.setdefault(worker.rank, worker.machine) != worker.machine:
            return None
        compared = "usually" if found.itself else "those that do the same"
        self._told = StragglerSeen(
            generation=self._generation,
            rank=worker.rank,
            machine=worker.machine,
            compute_s=worker.seconds,
            usual_s=found.should_s,
            costs=found.costs,
            why=f"rank {worker.rank} computes {worker.seconds:.3g} s in a step, {compared}"
            f" {found.should_s:.3g} s: all others wait for it {found.costs:.0%} of the time",
        )
        return self._told


def work_of(layout: Layout, rank: Rank) -> Hashable:
    """What a rank does: equal for ranks that do the same.

    Coordinates along everything but data and tensor parallelism, and the place among experts.
    """
    stages = tuple(
        at
        for dimension, at in zip(layout.dimensions, layout.coordinates(rank), strict=True)
        if role(dimension.name) not in ("dp", "tp")
    )
    experts = tuple(
        tuple((rank // stride) % size for stride, size in shape.factors)
        for shape in layout.shapes
        if role(shape.name) not in ("dp", "tp")
    )
    return stages, experts


def _usual(workers: list[Worker], paces: list[Seconds]) -> tuple[Seconds, Seconds]:
    """Median, and the spread around it as a standard deviation (0 of too few), of all but the
    machine that has the slowest: all its ranks may be slow.
    """
    if not paces:
        return 0.0, 0.0
    at = max(range(len(paces)), key=paces.__getitem__)
    slowest = workers[at].machine
    others = [pace for w, pace in zip(workers, paces, strict=True) if w.machine != slowest]
    if not others:
        others = paces[:at] + paces[at + 1 :] or paces
    middle = statistics.median_low(others)
    if len(others) < PEERS_MIN:
        return middle, 0.0
    return middle, 1.4826 * statistics.median(abs(pace - middle) for pace in others)
