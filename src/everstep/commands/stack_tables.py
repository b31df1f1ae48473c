"""What people read of one look at all stacks: the clusters, and how those few differ from the most.

Pure: a view of controller/look_views.py in, text and tables out. The same for a running job, for
one that is over and for dumps of any job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from everstep.controller.look_views import ChildView, ClusterView, LookView
from everstep.diagnosis.frames import Frame, Thread, serves
from everstep.looks import NO_STACK, Fingerprint, LookResult, Role, Stack, in_words, size_of

CLUSTERS_SHOWN = 12
"""Rows, and clusters whose frames are shown; of more there is no dominant one, or --full."""
FRAMES_SHOWN = 25
"""Of one thread, unless all are wanted: a recursion has a thousand."""
CHILD_FRAMES = 6
RANGES_SHOWN = 6
NAMES_SHOWN = 3
STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "cannot be killed",
    "T": "stopped",
    "t": "stopped by a tracer",
    "Z": "ended",
    "I": "idle",
}
"""What the kernel's letters mean."""
_ROLES = {
    Role.LOADER: "loader worker",
    Role.SAVER: "checkpoint writer",
    Role.COMPILER: "compile worker",
    Role.CHILD: "child",
    Role.RANK: "rank",
}


class Wanted(NamedTuple):
    """How much is shown."""

    all_threads: bool = False
    full: bool = False
    """Every cluster, and whole stacks, also of the largest cluster."""


def look(view: LookView, wanted: Wanted) -> Iterator[RenderableType]:
    """All of it, from the table to the verdict."""
    if view.clusters:
        yield clusters(view, wanted)
    texts = {stack.fingerprint: stack for stack in view.stacks}
    largest = view.clusters[0] if view.clusters else None
    shown = view.clusters if wanted.full else view.clusters[: CLUSTERS_SHOWN + 1]
    for number, cluster in enumerate(shown):
        if number == 0 and len(view.clusters) > 1 and not wanted.full:
            continue
        against = largest if number else None
        yield Text("\n".join(["", title(cluster)]), style="bold")
        yield from _frames(cluster, against, texts, wanted)
    yield from _rest(view)


def clusters(view: LookView, wanted: Wanted) -> Table:
    """One row each, the largest first."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("count", justify="right")
    shown = view.clusters if wanted.full else view.clusters[:CLUSTERS_SHOWN]
    columns = {
        "ranks": [_who(cluster) for cluster in shown],
        "machines": [_machines(cluster) for cluster in shown],
        "groups": [cluster.groups for cluster in shown],
        "kernel": [kernel(cluster) for cluster in shown],
        "what they do": [_does(cluster) for cluster in shown],
    }
    told = {name: texts for name, texts in columns.items() if any(texts)}
    for name in told:
        table.add_column(name, overflow="fold")
    for cluster, row in zip(shown, zip(*told.values(), strict=True), strict=True):
        table.add_row(str(cluster.count), *map(Text, row))
    more = view.clusters[len(shown) :]
    if more:
        left = sum(cluster.count for cluster in more)
        table.add_row(str(left), Text(f"in {len(more)} smaller clusters: see --full or --json"))
    return table


def title(cluster: ClusterView) -> str:
    """Who they are and what they do, as a heading."""
    where = f" on {_machines(cluster)}" if cluster.named else ""
    if cluster.machines > NAMES_SHOWN:
        where = f" on {cluster.machines} machines"
    state = kernel(cluster)
    told = f"{_called(cluster)}{where}: {_does(cluster)}"
    return f"{told} ({state})" if state and cluster.state not in "RS" else told


def kernel(seen: ClusterView | ChildView) -> str:
    """A state of the kernel with its meaning: "D nfs_wait_bit, cannot be killed"."""
    meaning = STATES.get(seen.state, "") if seen.state not in ("R", "S") else ""
    return ", ".join(filter(None, (" ".join(filter(None, (seen.state, seen.wchan))), meaning)))


def progress(answered: int, asked: int, fetching: int) -> str:
    """How far a look is."""
    if answered < asked:
        return f"{answered} of {asked} machines have answered"
    if fetching:
        return f"all {asked} machines have answered; {fetching} stacks are still to come"
    return f"all {asked} machines have answered"


# --- parts ---------------------------------------------------------------------------------------


def _rest(view: LookView) -> Iterator[RenderableType]:
    lines = [f"all that differ from the largest cluster: {view.outliers}"] * bool(view.outliers)
    lines += view.stood
    if view.silent:
        lines.append(f"no answer from {_list(view.silent)}")
    reached: dict[str, list[str]] = {}
    for who, whom in view.unreached:
        reached.setdefault(whom, []).append(who)
    lines += [f"{whom} could not be reached from {_list(who)}" for whom, who in reached.items()]
    lines += [f"note: {remark}" for remark in view.remarks]
    if lines:
        yield Text("\n".join(["", *lines]))
    verdict = view.verdict or "it is not judged"
    yield Text(f"\nverdict: {verdict}", style="bold")
    if names := _accused(view):
        yield Text(names)


def _accused(view: LookView) -> str:
    many = "s" * (size_of(view.judged_ranks) > 1)
    ranks = f"rank{many} {in_words(view.judged_ranks)}" if view.judged_ranks else ""
    group = f"group {view.judged_group}" if view.judged_group else ""
    named = [group, _list(view.judged_machines), ranks]
    if not any(named):
        return ""
    result = "" if view.result in (None, LookResult.SHOWN) else f" ({view.result})"
    return f"named{result}: {'; '.join(filter(None, named))}"


def _who(cluster: ClusterView) -> str:
    if cluster.ranks:
        return in_words(cluster.ranks, RANGES_SHOWN)
    few = len(cluster.processes) <= NAMES_SHOWN
    return ", ".join(cluster.processes) if few else "not known"


def _called(cluster: ClusterView) -> str:
    if cluster.ranks:
        many = cluster.count > 1
        return f"{cluster.count} ranks ({_who(cluster)})" if many else f"rank {_who(cluster)}"
    few = len(cluster.processes) <= NAMES_SHOWN
    return _who(cluster) if few and cluster.processes else f"{cluster.count} processes"


def _machines(cluster: ClusterView) -> str:
    named = cluster.named[:NAMES_SHOWN]
    if not named:
        return f"{cluster.machines}" if cluster.machines else ""
    if cluster.machines == len(named):
        return ", ".join(named)
    return f"{cluster.machines}: {', '.join(named)}, ..."


def _list(names: Sequence[str]) -> str:
    more = len(names) - CLUSTERS_SHOWN
    return ", ".join(names[:CLUSTERS_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _does(cluster: ClusterView) -> str:
    odd = [child for child in cluster.children if child.state in ("T", "t", "D", "Z")]
    return "; ".join([cluster.doing, *(_child_title(child) for child in odd)])


def _child_title(child: ChildView) -> str:
    count = f"{child.count} {_ROLES[child.role]}{'s' * (child.count > 1)}"
    state = kernel(child) if child.state not in ("R", "S", "") else ""
    return f"{count} {child.doing}" + (f" ({state})" if state else "")


# --- frames --------------------------------------------------------------------------------------


def _frames(
    cluster: ClusterView,
    largest: ClusterView | None,
    texts: Mapping[Fingerprint, Stack],
    wanted: Wanted,
) -> Iterator[Text]:
    """Its threads, and its children if those of the largest cluster do something else."""
    mine, others = texts.get(cluster.stack), None
    if largest is not None and cluster.stack != NO_STACK:
        others = texts.get(largest.stack)
    if mine is not None:
        for thread in _chosen(mine.threads, wanted):
            other = _partner(thread, others.threads) if others is not None else None
            yield _thread(thread, other, wanted)
    usual = {(each.role, each.stack, each.state) for each in (largest.children if largest else ())}
    for child in cluster.children:
        if (child.role, child.stack, child.state) not in usual:
            yield Text(f"  {_child_title(child)}", style="bold")
            stack = texts.get(child.stack)
            frames = _main(stack.threads).frames if stack is not None else ()
            yield from _child_frames(frames, wanted)


def _chosen(threads: Sequence[Thread], wanted: Wanted) -> Sequence[Thread]:
    if wanted.all_threads:
        return [thread for thread in threads if thread.frames]
    main = _main(threads)
    return [main, *(each for each in threads if each.holds_gil and each is not main)]


def _main(threads: Sequence[Thread]) -> Thread:
    """The main thread; without one the first that does something."""
    first = next((thread for thread in threads if thread.main and thread.frames), None)
    return first or next((t for t in threads if t.frames and not serves(t)), threads[0])


def _partner(thread: Thread, others: Sequence[Thread]) -> Thread | None:
    """The thread of the largest cluster's that is the same one."""
    if thread.main or not thread.name:
        return _main(others) if others else None
    return next((other for other in others if other.name == thread.name), None)


def _thread(thread: Thread, other: Thread | None, wanted: Wanted) -> Text:
    """Its frames, the innermost first; what it shares with the other one is one dim line."""
    text = Text()
    if wanted.all_threads or (thread.holds_gil and not thread.main):
        name = thread.name or ("main thread" if thread.main else "a thread")
        text.append(f"  {name}{', holds the GIL' if thread.holds_gil else ''}\n", style="italic")
    frames = _from_python(thread.frames)
    common = _shared(frames, _from_python(other.frames)) if other is not None else 0
    own = frames[: len(frames) - common]
    if not own and not wanted.full:
        return text.append("    the same stack as the largest cluster", style="dim")
    most = len(own) if wanted.full else FRAMES_SHOWN
    lines = [f"    {_frame(frame)}" for frame in own[:most]]
    if len(own) > most:
        lines.append(f"    ... {len(own) - most} more")
    text.append("\n".join(lines))
    if common and wanted.full:
        shared = "\n".join(f"    {_frame(frame)}" for frame in frames[len(own) :])
        text.append("\n" * bool(own) + shared, style="dim")
    elif common:
        text.append(f"\n    ... {common} frame{'s' * (common > 1)} in common", style="dim")
    return text


def _from_python(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Without what started the interpreter: only stacks with native frames have that."""
    last = len(frames)
    while last and (frames[last - 1].name.startswith("0x") or ".so" in frames[last - 1].file):
        last -= 1
    return frames[:last] or frames


def _shared(mine: Sequence[Frame], others: Sequence[Frame]) -> int:
    """How many of the outermost frames are the same, lines included."""
    count = 0
    for one, other in zip(reversed(mine), reversed(others), strict=False):
        if one != other:
            break
        count += 1
    return count


def _child_frames(frames: Sequence[Frame], wanted: Wanted) -> Iterator[Text]:
    most = len(frames) if wanted.full else CHILD_FRAMES
    if frames:
        yield Text("\n".join(f"    {_frame(frame)}" for frame in frames[:most]))


def _frame(frame: Frame) -> str:
    line = f":{frame.line}" if frame.line else ""
    return f"{frame.name} ({frame.file}{line})" if frame.file else frame.name
