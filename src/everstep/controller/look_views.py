"""What people are shown of looks at stacks: pure, from the core's state or from files of any job.

looks.py answers with them over HTTP, the command computes the same from a replayed journal, and
`everstep stacks DUMP...` from dumps. They decide nothing: what a look means is aggregate.py's
matter, and stands in the look.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from everstep.controller.standing_views import standing_lines
from everstep.core.groups import Layout
from everstep.core.layouts import known_layout
from everstep.core.look_state import Look
from everstep.core.state import Incident, State
from everstep.diagnosis.activity import Activity, Doing, doing
from everstep.diagnosis.findings import Place
from everstep.diagnosis.frames import Dump
from everstep.looks import (
    NO_STACK,
    Child,
    Cluster,
    Fingerprint,
    LookResult,
    Posture,
    Purpose,
    Ranges,
    Role,
    Shown,
    Stack,
    ranges_of,
    ranks_in,
    size_of,
)
from everstep.model import JobId, MachineId, NodeRank, Rank, Seconds, Value

NAMES = 16
"""Machines of a cluster that are named; of more only the first."""
_NOWHERE = Place(file="", line=1, text="")


class ChildView(Value, frozen=True, kw_only=True):
    """Children of the ranks of a cluster that show the same."""

    role: Role
    count: int
    """Of one rank."""
    doing: str
    state: str
    wchan: str
    stack: Fingerprint
    why_none: str


class ClusterView(Value, frozen=True, kw_only=True):
    """Ranks that show the same."""

    count: int
    ranks: Ranges
    """Empty if nobody knows which they are."""
    processes: tuple[str, ...] = ()
    """Their names, where ranks are not known."""
    machines: int
    """How many have some of them; 0: not known."""
    named: tuple[str, ...]
    """The first of these."""
    groups: str
    """Which parallel groups they fill, or lie in; empty if no layout is known."""
    doing: str
    """In words."""
    state: str
    wchan: str
    stack: Fingerprint
    why_none: str
    """Why there is no stack, as a clause; empty if there is one."""
    children: tuple[ChildView, ...]


class LookView(Value, frozen=True, kw_only=True):
    """One look at all stacks."""

    number: int
    purpose: Purpose
    why: str
    round: int
    asked_at: Seconds
    asked: int
    """Machines."""
    silent: tuple[str, ...]
    """Machines that did not answer."""
    clusters: tuple[ClusterView, ...]
    """The largest first."""
    outliers: str
    """Which parallel groups all but the largest cluster fill together, if they are several."""
    stood: tuple[str, ...]
    """How far collectives are, one sentence for each group that waits."""
    unreached: tuple[tuple[str, str], ...]
    """(who tried, whom it could not reach)."""
    remarks: tuple[str, ...]
    """What the look shows less of than it could, and why."""
    result: LookResult | None
    """None: it is not judged yet."""
    verdict: str
    judged_ranks: Ranges
    judged_machines: tuple[str, ...]
    judged_group: str
    stacks: tuple[Stack, ...]
    """The text of each fingerprint once."""


class UnderWay(Value, frozen=True, kw_only=True):
    """A look that is not judged yet."""

    number: int
    why: str
    asked: int
    answered: int
    fetching: int
    """Stacks whose text is still to come."""
    age_s: Seconds


class StacksView(Value, frozen=True, kw_only=True):
    """Answer to GET /v1/stacks."""

    job: JobId
    newest: LookView | None = None
    """The newest one that is judged and later than was asked for."""
    under_way: UnderWay | None = None
    wanted: bool = False
    """Somebody asked for a look that has not begun."""


class Positions(Value, frozen=True, kw_only=True):
    """Where ranks run, as far as it is known."""

    per_machine: int | None = None
    names: Mapping[int, str] = {}
    """Of machines, by position."""
    machine_of: Mapping[Rank, str] = {}
    """Names of machines by rank, where positions are not known."""
    layout: Layout | None = None

    def machines_of(self, ranks: Ranges) -> Ranges:
        """The positions of the machines that have these ranks."""
        per = self.per_machine
        return (
            ranges_of(at for a, b in ranks for at in range(a // per, b // per + 1)) if per else ()
        )

    def named(self, ranks: Ranges) -> tuple[str, ...]:
        """The names of these machines, as far as they are known."""
        if self.per_machine:
            return tuple(
                self.names[at] for at in ranks_in(self.machines_of(ranks)) if at in self.names
            )
        known = (self.machine_of.get(rank, "") for rank in ranks_in(ranks))
        return tuple(dict.fromkeys(filter(None, known)))


# --- of a running job ----------------------------------------------------------------------------


def stacks(state: State, now: Seconds, *, after: int = 0) -> StacksView:
    """The newest look that is judged and later than number `after`, and one that goes on."""
    known = [look for look in all_looks(state) if look.number > after]
    judged = [look for look in known if look.result is not None]
    going = [look for look in known if look.result is None]
    return StacksView(
        job=state.job.job,
        newest=look_view(state, _telling(judged)) if judged else None,
        under_way=_under_way(going[-1], now) if going else None,
        wanted=bool(state.stacks_wanted_by),
    )


def all_looks(state: State) -> list[Look]:
    """Every look that is still known, oldest first."""
    watched = state.watching.looks if state.watching is not None else []
    judged = [state.judged] if state.judged is not None else []
    found = {look.number: look for look in (*state.looks, *judged, *watched)}
    return [found[number] for number in sorted(found)]


def _telling(judged: Sequence[Look]) -> Look:
    """The newest of which more than the verdict is kept."""
    return next((look for look in reversed(judged) if look.clusters or look.silent), judged[-1])


def look_view(state: State, look: Look) -> LookView:
    """One look of a job."""
    at = _positions_in(state, look)
    where = Positions(
        per_machine=state.job.nproc_per_node,
        names={int(place): _called(state, name) for name, place in at.items()},
        layout=known_layout(state).layout,
    )
    silent = [(name, at.get(name)) for name in look.silent]
    clusters = [*look.clusters, *_of_silent(silent, state)]
    return LookView(
        number=look.number,
        purpose=look.purpose,
        why=look.why,
        round=look.round,
        asked_at=look.asked_at,
        asked=len(look.asked),
        silent=tuple(_called(state, name) for name in look.silent),
        clusters=cluster_views(clusters, look.stacks, where),
        outliers=outliers_in_words(clusters, where),
        stood=standing_lines(look.stood),
        unreached=tuple((_called(state, a), _called(state, b)) for a, b in look.unreached),
        remarks=tuple(dict.fromkeys(look.remarks)),
        result=look.result,
        verdict=look.verdict,
        judged_ranks=ranges_of(look.ranks),
        judged_machines=tuple(_called(state, name) for name in look.machines),
        judged_group=look.group,
        stacks=tuple(look.stacks.values()),
    )


def _positions_in(state: State, look: Look) -> dict[MachineId, NodeRank]:
    """Who had which position then. All that were asked are in order, if none was missing."""
    if len(look.asked) == state.job.nnodes:
        return {name: NodeRank(place) for place, name in enumerate(look.asked)}
    if look.generation != state.generation:
        return {}
    placed = state.machines.values()
    return {each.machine: each.node_rank for each in placed if each.node_rank is not None}


def _called(state: State, name: MachineId) -> str:
    """A machine by its id, and by its host where that says more."""
    machine = state.machines.get(name)
    host = machine.host if machine is not None and not state.job.local else ""
    return f"{name} ({host})" if host and host != name else name


def _of_silent(silent: Iterable[tuple[MachineId, NodeRank | None]], state: State) -> list[Cluster]:
    """The ranks of machines that did not answer, as one cluster."""
    per = state.job.nproc_per_node
    ranks = [at * per + local for _, at in silent if at is not None for local in range(per)]
    if not ranks:
        return []
    shown = Shown(why_none="its machine did not answer")
    return [Cluster(posture=Posture(rank=shown), ranks=ranges_of(ranks))]


def _under_way(look: Look, now: Seconds) -> UnderWay:
    return UnderWay(
        number=look.number,
        why=look.why,
        asked=len(look.asked),
        answered=len(look.asked) - len(look.awaiting),
        fetching=len(look.fetching),
        age_s=max(0.0, now - look.asked_at),
    )


# --- clusters ------------------------------------------------------------------------------------


def cluster_views(
    clusters: Iterable[Cluster],
    texts: Mapping[Fingerprint, Stack],
    where: Positions,
    processes: Mapping[int, str] = {},
) -> tuple[ClusterView, ...]:
    """The largest first. `processes`: names of those of which no rank is known, by number."""
    ordered = sorted(clusters, key=_by_size)
    return tuple(
        _cluster(cluster, texts, where, processes, dominant=number == 0 and len(ordered) > 1)
        for number, cluster in enumerate(ordered)
    )


def _cluster(
    cluster: Cluster,
    texts: Mapping[Fingerprint, Stack],
    where: Positions,
    processes: Mapping[int, str],
    *,
    dominant: bool,
) -> ClusterView:
    shown = cluster.posture.rank
    at = where.machines_of(cluster.ranks)
    named = where.named(cluster.ranks)
    lettered = tuple(processes[one] for one in ranks_in(cluster.ranks) if one in processes)
    return ClusterView(
        count=size_of(cluster.ranks),
        ranks=() if lettered else cluster.ranks,
        processes=lettered,
        machines=size_of(at) or len(named),
        named=named[:NAMES],
        groups="" if dominant else _groups(cluster, where),
        doing=doing_in_words(shown, texts),
        state=shown.state,
        wchan=shown.wchan,
        stack=shown.stack,
        why_none=shown.why_none,
        children=tuple(_child(child, texts) for child in cluster.posture.children),
    )


def _child(child: Child, texts: Mapping[Fingerprint, Stack]) -> ChildView:
    shown = child.shown
    return ChildView(
        role=child.role,
        count=child.count,
        doing=doing_in_words(shown, texts),
        state=shown.state,
        wchan=shown.wchan,
        stack=shown.stack,
        why_none=shown.why_none,
    )


def doing_of_shown(shown: Shown, texts: Mapping[Fingerprint, Stack]) -> Doing | None:
    """What a process does, by its stack; None if that is not there."""
    stack = texts.get(shown.stack)
    if stack is None or not stack.threads:
        return None
    kernel = (shown.wchan,) if shown.wchan else ()
    return doing(Dump(place=_NOWHERE, threads=stack.threads, state=shown.state, kernel=kernel))


def doing_in_words(shown: Shown, texts: Mapping[Fingerprint, Stack]) -> str:
    """The same for people, with what stands instead of a stack."""
    found = doing_of_shown(shown, texts)
    if found is not None:
        return str(found)
    if shown.stack != NO_STACK:
        return "its stack was not sent"
    return f"{Activity.UNSEEN}: {shown.why_none}" if shown.why_none else str(Activity.UNSEEN)


def _groups(cluster: Cluster, where: Positions) -> str:
    if where.layout is None:
        return ""
    return groups_in_words(where.layout, ranks_in(cluster.ranks))


def outliers_in_words(clusters: Iterable[Cluster], where: Positions) -> str:
    """The groups of all that are not in the largest cluster, together."""
    others = sorted(clusters, key=_by_size)[1:]
    if where.layout is None or len(others) < 2:
        return ""
    return groups_in_words(where.layout, [rank for each in others for rank in ranks_in(each.ranks)])


def _by_size(cluster: Cluster) -> tuple[int, Ranges]:
    return -size_of(cluster.ranks), cluster.ranks


def groups_in_words(layout: Layout, of: Iterable[Rank]) -> str:
    """As "2 whole pp groups, 4 whole tp groups"; of what fills none, the smallest that has all."""
    ranks = [rank for rank in of if rank < layout.world_size]
    if len(ranks) < 2:
        return ""
    filled: list[str] = []
    within: list[tuple[int, str]] = []
    for shape in layout.shapes:
        counts: dict[int, int] = {}
        for rank in ranks:
            first = rank - sum(stride * (rank // stride % n) for stride, n in shape.factors)
            counts[first] = counts.get(first, 0) + 1
        size = 1
        for _, n in shape.factors:
            size *= n
        kind = shape.name or f"unnamed ({size})"
        if all(count == size for count in counts.values()):
            filled.append(f"{len(counts)} whole {kind} group{'s' * (len(counts) > 1)}")
        elif len(counts) == 1:
            within.append((size, f"in one {kind} group of {size}"))
    return ", ".join(filled) or min(within, default=(0, ""))[1]


# --- one line each -------------------------------------------------------------------------------


def watching(state: State, now: Seconds) -> str:
    """What is looked into now, as a sentence; empty if nothing is."""
    watched = state.watching
    if watched is None:
        return ""
    looks = [each for each in watched.looks if each.purpose is watched.purpose]
    if not looks:
        return ""
    why, look = looks[0].why, looks[-1]
    if look.result is None:
        return f"{why}: looking at the stacks of all ranks, round {look.round}"
    told = f"{why}: {look.verdict or look.result}"
    if watched.next_at is None:
        return told
    return f"{told}; looking again in {max(0.0, watched.next_at - now):.0f} s"


def straggler(state: State) -> str:
    """Who holds up all others although nothing stands still; empty if nobody does."""
    found = state.straggler
    if found is None:
        return ""
    return (
        f"rank {found.rank} on {found.machine} costs all others {found.costs:.0%} of each step:"
        f" {found.why}"
    )


def judged_of(state: State, incident: Incident) -> Look | None:
    """The look that decided an incident, if one did."""
    end = incident.closed_at
    found = [
        look
        for look in all_looks(state)
        if look.result is not None
        and look.purpose is not Purpose.ASKED
        and incident.opened_at <= look.judged_at
        and (end is None or look.judged_at <= end)
    ]
    return found[-1] if found else None


def group_of(look: Look) -> str:
    """The group that was judged as a whole, with its ranks; empty if none was."""
    if look.result is not LookResult.MACHINES or not look.group:
        return ""
    return look.group
