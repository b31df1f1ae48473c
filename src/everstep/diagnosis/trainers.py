"""Which processes of a dump train, what each of them does, and who holds and who waits.

Used by outliers.py and stacks.py. Launchers, loaders' workers and other children are no trainers;
two dumps of one process are one trainer that moved or stood still.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from everstep.diagnosis.activity import HIDES, WAITS, Activity, Doing, doing
from everstep.diagnosis.frames import Dump, plain
from everstep.model import Rank, Value

FEW = 0.25
"""More holders than this share of the processes are no outliers, whatever they do."""
_LAUNCHERS = (
    "torch/distributed/elastic/",
    "torch/distributed/run.py",
    "torch/distributed/launcher/",
    "everstep/agent/parking.py",
    "everstep/keeper.py",
    "everstep/controller/",
)
_ASSISTANTS = (
    "resource_tracker",
    "forkserver",
    "compile_worker",
    "wandb-core",
    "wandb-service",
    "pt_data_",
)


class Seen(Value, frozen=True, kw_only=True):
    """One trainer's process in one attempt."""

    dump: Dump
    doing: Doing
    moved: bool | None = None
    """Whether its stack differed between two dumps; None if there is one only."""
    workers: tuple[Dump, ...] = ()

    @property
    def name(self) -> str:
        """As a sentence names it."""
        if self.dump.rank is not None:
            return f"rank {self.dump.rank}"
        return f"process {self.dump.pid}" if self.dump.pid is not None else "one process"

    @property
    def machine(self) -> str:
        """Its machine, or the file it stands in, which is one machine's if it has many."""
        return self.dump.machine or self.dump.place.file


class Split(Value, frozen=True, kw_only=True):
    """How the processes of one attempt divide."""

    seen: tuple[Seen, ...]
    waiting: tuple[Seen, ...]
    holders: tuple[Seen, ...]

    @property
    def few(self) -> bool:
        """Whether the holders are few enough to be outliers."""
        return 0 < len(self.holders) <= max(1, int(FEW * len(self.seen))) < len(self.seen)


def attempts_of(dumps: Iterable[Dump]) -> list[list[Dump]]:
    """Dumps by run of the job: the same rank under another pid or elsewhere is a new run."""
    runs: list[list[Dump]] = []
    owners: list[dict[Rank, tuple[str | None, int | None]]] = []
    last: dict[str, int] = {}
    for dump in dumps:
        rank, who = dump.rank, (dump.machine, dump.pid)
        at = last.get(dump.place.file, 0)
        if rank is not None and not dump.child:
            while at < len(runs) and not _may_be(owners[at].get(rank, who), who):
                at += 1
        if at == len(runs):
            runs.append([])
            owners.append({})
        if rank is not None and not dump.child:
            owners[at][rank] = who
        runs[at].append(dump)
        last[dump.place.file] = at
    return runs


def _may_be(one: tuple[str | None, int | None], other: tuple[str | None, int | None]) -> bool:
    """Whether two dumps of a rank can be of one process: what both say is the same."""
    return all(a is None or b is None or a == b for a, b in zip(one, other, strict=True))


def split_of(dumps: Sequence[Dump]) -> Split:
    """The processes that train, and which of them wait for others."""
    seen = _of_the_job(tuple(_trainers(dumps)))
    waiting = [each for each in seen if each.doing.activity in WAITS]
    hidden: dict[tuple[Activity, str], list[Seen]] = defaultdict(list)
    holders = []
    for each in seen:
        if each.doing.activity in HIDES:
            hidden[each.doing.activity, each.doing.at or each.doing.call].append(each)
        elif each.doing.activity not in WAITS:
            holders.append(each)
    for group in hidden.values():
        # The same place on many ranks is a collective that the dump does not show.
        alike = len(group) > 1 and len(group) > FEW * len(seen)
        (waiting if alike or not (waiting or holders) else holders).extend(group)
    return Split(seen=seen, waiting=tuple(waiting), holders=tuple(holders))


def _of_the_job(seen: tuple[Seen, ...]) -> tuple[Seen, ...]:
    """Without what has no rank where nearly all have one: a driver, an agent, a tool."""
    ranked = tuple(each for each in seen if each.dump.rank is not None)
    return ranked if len(ranked) > max(1, len(seen) // 2) else seen


def _trainers(dumps: Sequence[Dump]) -> Iterable[Seen]:
    """One for each process that trains, from its last dump, with the processes that help it."""
    samples: dict[tuple[object, ...], list[Dump]] = {}
    workers: dict[tuple[object, ...], list[Dump]] = defaultdict(list)
    owner: tuple[object, ...] = ()
    for dump in dumps:
        if _launches(dump):
            continue
        if dump.child or _assists(dump):
            workers[owner].append(dump)
            continue
        if dump.rank is not None:
            owner = (dump.rank,)
        elif dump.pid is not None:
            owner = (dump.machine, dump.pid, dump.place.file)
        else:
            owner = (dump.machine, len(samples), dump.place.file)
        samples.setdefault(owner, []).append(dump)
    for key, group in samples.items():
        stacks = [dump for dump in group if dump.threads] or group
        last = msgspec.structs.replace(
            stacks[-1],
            state=next((dump.state for dump in group if dump.state), ""),
            kernel=next((dump.kernel for dump in group if dump.kernel), ()),
        )
        yield Seen(
            dump=last,
            doing=doing(last),
            moved=len({_exact(dump) for dump in stacks}) > 1 if len(stacks) > 1 else None,
            workers=tuple(workers[key]),
        )


def _exact(dump: Dump) -> tuple[tuple[str, int], ...]:
    main = dump.main
    return tuple((frame.name, frame.line) for frame in main.frames) if main else ()


def _launches(dump: Dump) -> bool:
    frames = dump.main.frames if dump.main is not None else ()
    return any(part in frame.file for frame in frames[:8] for part in _LAUNCHERS)


def _assists(dump: Dump) -> bool:
    names = {plain(frame.name) for thread in dump.threads for frame in thread.frames}
    return "_worker_loop" in names or any(word in dump.command for word in _ASSISTANTS)
