"""From dumps of any job to the view of one look at its stacks, for `everstep stacks DUMP...`.

Reads what py-spy, faulthandler, gdb and torch's flight recorder wrote, by way of diagnosis/. Needs
no job, no controller and no torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from everstep.commands.dump_files import UNREADABLE, Opened, files_of, why_unread
from everstep.commands.layout_text import layout_spec
from everstep.controller.look_views import LookView, Positions, cluster_views, outliers_in_words
from everstep.controller.standing_views import standing_lines
from everstep.core.aggregate import Conclusion, Taken, conclude
from everstep.core.groups import Layout, layout_of
from everstep.diagnosis import flight, stacks
from everstep.diagnosis.dumps import weighed
from everstep.diagnosis.findings import Finding, Site
from everstep.diagnosis.fingerprints import fingerprint_of
from everstep.diagnosis.flight import Record
from everstep.diagnosis.frames import Dump, plain
from everstep.diagnosis.outliers import analyse
from everstep.diagnosis.standing import Standing
from everstep.diagnosis.trainers import Seen, attempts_of, split_of
from everstep.looks import (
    NO_STACK,
    Child,
    Cluster,
    Fingerprint,
    LookResult,
    Posture,
    Purpose,
    Role,
    Shown,
    Stack,
    Stood,
    in_words,
    ranges_of,
    ranks_in,
)
from everstep.model import Rank, UserError

BYTES_MAX = 64 << 20
"""Of one file: the dump of a rank with stacks has about 5 MB, and what is larger is a log."""
CALLS = 3
"""Pending collectives of one rank in one group that are kept."""
_COMPILERS = ("compile_worker",)


class Asked(NamedTuple):
    """What the command was told besides its files."""

    layout: str | None = None
    ranks_per_machine: int | None = None


class Files(NamedTuple):
    """What was read."""

    dumps: list[Dump]
    records: list[Record]
    told: int
    """Files that had some."""
    unread: tuple[str, ...]


class Processes(NamedTuple):
    """Who is in the look."""

    clusters: tuple[Cluster, ...]
    stacks: Mapping[Fingerprint, Stack]
    ranks: Mapping[Rank, str]
    """Ranks that are known, with their machine; empty if that is not."""
    unknown: Mapping[int, Seen]
    """Numbers that stand in for ranks, with the processes of which no rank is known."""


def look_of_dumps(paths: Sequence[str], asked: Asked) -> LookView:
    """One look made of all dumps in these files. Raises UserError."""
    layout = _layout(asked)
    files = _read(paths)
    runs = attempts_of(files.dumps)
    records = flight.runs_of(files.records)
    who = _processes(runs[-1] if runs else [])
    where = _positions(who, asked, layout)
    names = {number: _called(each) for number, each in who.unknown.items()}
    site = _site(where)
    stood = _stood(records[-1] if records else [])
    view = LookView(
        number=0,
        purpose=Purpose.ASKED,
        why=_what(files, runs),
        round=1,
        asked_at=0.0,
        asked=0,
        silent=(),
        clusters=cluster_views(who.clusters, who.stacks, where, names),
        outliers=outliers_in_words(who.clusters, where),
        stood=standing_lines(stood),
        unreached=(),
        remarks=(*_missing(who, stood, layout), *files.unread),
        result=LookResult.SHOWN,
        verdict="",
        judged_ranks=(),
        judged_machines=(),
        judged_group="",
        stacks=tuple(who.stacks.values()),
    )
    if layout is None:
        return _with_finding(view, weighed((*flight.analyse(records, site), *analyse(runs, site))))
    peers = tuple(peer for record in records[-1:] for each in record for peer in each.peers)
    taken = Taken(
        clusters=who.clusters,
        stacks=who.stacks,
        stood=tuple(stood),
        peers=peers,
        layout=layout,
        world_size=layout.world_size,
        ranks_per_machine=layout.ranks_per_machine,
    )
    return _with_conclusion(view, conclude(taken), where)


# --- reading -------------------------------------------------------------------------------------


def _read(paths: Sequence[str]) -> Files:
    dumps: list[Dump] = []
    records: list[Record] = []
    unread = []
    names = list(files_of(paths))
    count = 0
    for name in names:
        try:
            with Opened(name) as (source, _):
                data = source.read(BYTES_MAX + 1)
        except UNREADABLE as error:
            unread.append(why_unread(name, error))
            continue
        if len(data) > BYTES_MAX:
            unread.append(f"{name}: it has more than {BYTES_MAX >> 20} MiB, so it is no dump")
            continue
        record = flight.read(data, name)
        dump = None if record else stacks.read(data.decode("utf-8", errors="replace"), name)
        count += bool(record or dump)
        records += record or []
        dumps += dump or []
    if not count:
        raise UserError(_nothing(paths, len(names), unread))
    return Files(stacks.numbered(dumps, Site()), records, count, tuple(unread))


def _nothing(paths: Sequence[str], count: int, unread: Sequence[str]) -> str:
    where = ", ".join(paths)
    if unread and len(unread) == count:
        return f"Nothing could be read: {'; '.join(unread)}."
    return (
        f"There is no stack dump and no flight record in {where} ({count} files): give what py-spy"
        " dump, faulthandler, gdb or torch's flight recorder wrote."
    )


def _what(files: Files, runs: Sequence[Sequence[Dump]]) -> str:
    many = f"{files.told} file{'s' * (files.told > 1)}"
    kinds = [f"{len(files.dumps)} stack dumps"] * bool(files.dumps)
    kinds += [f"{len(files.records)} flight records"] * bool(files.records)
    newest = f"; of {len(runs)} attempts the newest is shown" if len(runs) > 1 else ""
    return f"{' and '.join(kinds)} in {many}{newest}"


# --- who does what -------------------------------------------------------------------------------


def _processes(run: Sequence[Dump]) -> Processes:
    texts: dict[Fingerprint, Stack] = {}
    alike: dict[Posture, list[int]] = defaultdict(list)
    ranks: dict[Rank, str] = {}
    unknown: dict[int, Seen] = {}
    seen = split_of(run).seen
    free = 1 + max((each.dump.rank for each in seen if each.dump.rank is not None), default=-1)
    for number, each in enumerate(seen):
        rank = each.dump.rank
        if rank is None:
            unknown[free + number] = each
        else:
            ranks[rank] = each.dump.machine or ""
        alike[_posture(each, texts)].append(free + number if rank is None else rank)
    clusters = [Cluster(posture=shown, ranks=ranges_of(who)) for shown, who in alike.items()]
    return Processes(tuple(clusters), texts, ranks, unknown)


def _called(each: Seen) -> str:
    where = each.dump.machine or Path(each.dump.place.file).name
    pid = each.dump.pid
    return f"process {pid} of {where}" if pid is not None else f"a process of {where}"


def _posture(each: Seen, texts: dict[Fingerprint, Stack]) -> Posture:
    children = Counter((_role(worker), _shown(worker, texts)) for worker in each.workers)
    ordered = sorted(children.items(), key=lambda item: (item[0][0], item[0][1].stack))
    return Posture(
        rank=_shown(each.dump, texts),
        children=tuple(
            Child(role=role, shown=shown, count=count) for (role, shown), count in ordered
        ),
    )


def _shown(dump: Dump, texts: dict[Fingerprint, Stack]) -> Shown:
    stack = NO_STACK
    if any(thread.frames for thread in dump.threads):
        stack = Fingerprint(fingerprint_of(dump.threads))
        texts.setdefault(stack, Stack(fingerprint=stack, threads=dump.threads))
    return Shown(
        stack=stack,
        state=dump.state,
        wchan=dump.kernel[0] if dump.kernel else "",
        why_none="" if stack else "its dump has no frames",
    )


def _role(worker: Dump) -> Role:
    names = {plain(frame.name) for thread in worker.threads for frame in thread.frames}
    if "_worker_loop" in names:
        return Role.LOADER
    if any(word in worker.command for word in _COMPILERS):
        return Role.COMPILER
    return Role.CHILD


# --- where they run ------------------------------------------------------------------------------


def _layout(asked: Asked) -> Layout | None:
    per = asked.ranks_per_machine
    if per is not None and per < 1:
        raise UserError(f"--nproc-per-node {per}: a machine has 1 rank or more.")
    return None if asked.layout is None else layout_of(layout_spec(asked.layout), per or 1)


def _positions(who: Processes, asked: Asked, layout: Layout | None) -> Positions:
    ranks = who.ranks
    if layout is not None and ranks and max(ranks) >= layout.world_size:
        raise UserError(
            f"--layout {asked.layout} has {layout.world_size} ranks, and there is a dump of rank"
            f" {max(ranks)}: give the sizes of this job."
        )
    per = None if who.unknown else asked.ranks_per_machine or _ranks_per_machine(ranks)
    other = {Rank(number): each.dump.machine or "" for number, each in who.unknown.items()}
    return Positions(
        per_machine=per,
        names={rank // per: name for rank, name in ranks.items() if name} if per else {},
        machine_of={rank: name for rank, name in {**ranks, **other}.items() if name},
        layout=layout,
    )


def _ranks_per_machine(ranks: Mapping[Rank, str]) -> int | None:
    """As dumps show it: machines that they name have as many consecutive ranks each."""
    of: dict[str, list[int]] = defaultdict(list)
    for rank, name in ranks.items():
        of[name].append(rank)
    sizes = {len(each) for each in of.values()}
    if "" in of or len(sizes) != 1:
        return None
    per = sizes.pop()
    regular = all(len({rank // per for rank in each}) == 1 for each in of.values())
    return per if regular else None


def _site(where: Positions) -> Site:
    size = where.layout.world_size if where.layout is not None else None
    count = max(where.names, default=-1) + 1
    whole = count == len(where.names) and count > 0
    hosts = tuple(where.names[at] for at in range(count)) if whole else ()
    return Site(world_size=size, ranks_per_machine=where.per_machine, hosts=hosts)


# --- collectives ---------------------------------------------------------------------------------


def _stood(records: Iterable[Record]) -> list[Stood]:
    return [
        _stand(standing)
        for record in records
        for standing in record.standings
        if standing.rank >= 0
    ]


def _stand(standing: Standing) -> Stood:
    done = -1 if standing.completed is None else standing.completed
    calls = sorted((seq, call) for seq, call in standing.calls.items() if seq > done)
    return Stood(
        group=standing.group,
        members=ranges_of(standing.members),
        enqueued=standing.enqueued,
        completed=standing.completed,
        calls=tuple(calls[:CALLS]),
        ranks=ranges_of([standing.rank]),
    )


# --- what it means -------------------------------------------------------------------------------


def _missing(who: Processes, stood: Sequence[Stood], layout: Layout | None) -> list[str]:
    """Ranks that left neither dump nor record."""
    if layout is None or who.unknown:
        return []
    there = {*who.ranks, *(rank for each in stood for rank in ranks_in(each.ranks))}
    absent = [rank for rank in range(layout.world_size) if rank not in there]
    if not absent:
        return []
    return [f"no dump of {len(absent)} of {layout.world_size} ranks: {in_words(ranges_of(absent))}"]


def _with_finding(view: LookView, findings: Sequence[Finding]) -> LookView:
    """The verdict of `everstep diagnose`."""
    if not findings:
        return replace(view, verdict="nobody can be named by these dumps")
    root = findings[0]
    undecided = f"; what would tell: {root.undecided}" if root.undecided else ""
    return replace(
        view,
        verdict=root.why + undecided,
        judged_ranks=ranges_of(root.accused_ranks),
        judged_machines=root.accused_machines,
    )


def _with_conclusion(view: LookView, found: Conclusion, where: Positions) -> LookView:
    """What everstep would conclude of its own job."""
    known = where.per_machine is not None
    names = [where.names.get(at, f"machine {at}") for at in found.machines] if known else []
    return replace(
        view,
        result=found.result,
        verdict=found.why,
        judged_ranks=ranges_of(found.ranks),
        judged_machines=tuple(names),
        judged_group=found.group,
    )
