"""Which process holds the others up: the analysis of stack dumps.

Called by the judge's inputs with all dumps of a job. ByteRobust (section 5.1) groups stacks and
takes the small groups for the culprits. That alone accuses the wrong ones: waiting ranks of a
pipeline differ, a minority can be ahead, and a split that is the same on every machine is a layout.
So a rank is named only if it does something else than wait while the others wait for it, and a
machine only if what is wrong stays with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from everstep.diagnosis.activity import HIDES, Activity, Doing, doing
from everstep.diagnosis.findings import Finding, Site, Speaker
from everstep.diagnosis.frames import Dump, plain
from everstep.diagnosis.trainers import FEW, Seen, Split, split_of
from everstep.diagnosis.words import Category, FirstAction, Grade, Role, RootClass
from everstep.model import Rank, Value

_ROOTS = {
    Activity.LOCK: RootClass.USER_CODE,
    Activity.GIL: RootClass.USER_CODE,
    Activity.DEBUGGER: RootClass.USER_CODE,
    Activity.EVALUATE: RootClass.USER_CODE,
    Activity.SAVE: RootClass.USER_CODE,
    Activity.COMPILE: RootClass.USER_CODE,
    Activity.COLLECT: RootClass.USER_CODE,
    Activity.SLEEP: RootClass.USER_CODE,
    Activity.EXIT: RootClass.USER_CODE,
    Activity.REMOTE: RootClass.TRANSIENT,
}
"""Where the cause of one holder probably lies; ambiguous if it is not here."""
_ASK = frozenset({Activity.DEBUGGER, Activity.EVALUATE, Activity.SAVE, Activity.EXIT})
"""What a program does on purpose: a test of machines would find nothing."""
_UNSURE = frozenset({Activity.EXIT, Activity.REMOTE, Activity.SYNC, Activity.BACKWARD})
"""Who is in these is named and not accused: it left the others, it waits for a service, or it waits
below Python, perhaps for the others."""
_OUTSIDE = frozenset({Activity.STORAGE, Activity.REMOTE})


class _Take(Value, frozen=True, kw_only=True):
    """How a split is to be taken."""

    root: RootClass = RootClass.AMBIGUOUS
    action: FirstAction = FirstAction.STOP_TIME_CHECK
    ranks: tuple[Rank, ...] = ()
    machines: tuple[str, ...] = ()
    undecided: str = ""


def analyse(attempts: Sequence[Sequence[Dump]], site: Site) -> list[Finding]:
    """What the dumps of all attempts tell: one root, the others confirm it.

    `attempts` are in the order of time. Without two processes that can be compared a finding says
    what the one does and accuses nobody.
    """
    splits = [split_of(dumps) for dumps in attempts]
    findings = []
    for at, split in enumerate(splits):
        if split.seen and (found := _judge(split, site, at)) is not None:
            findings.append(found)
    told = _history(splits, findings)
    if told is not None:
        findings.append(told)
    return [*findings[-1:], *(_witness(each) for each in findings[-2::-1])]


def _witness(finding: Finding) -> Finding:
    """An earlier attempt's: the last word has the newest, or the history of all."""
    return msgspec.structs.replace(finding, role=Role.CONFIRM)


# What that means


def _judge(split: Split, site: Site, attempt: int) -> Finding | None:
    if all(each.moved for each in split.seen):
        return _finding(
            "stacks.moving",
            split.seen[0],
            attempt,
            f"the stacks of all {len(split.seen)} processes changed between two dumps: it works",
            _Take(
                root=RootClass.NONE,
                action=FirstAction.NONE,
            ),
        )
    if split.holders and not split.waiting:
        return _all_hold(split, attempt)
    if split.holders and _on_every_machine(split, split.holders):
        return _layout(split, attempt)
    if split.few:
        return _outliers(split, attempt)
    if split.holders:
        return _many(split, attempt)
    return _missing(split, site, attempt) or _all_wait(split, attempt)


def _outliers(split: Split, attempt: int) -> Finding:
    """Few do something else while all others wait."""
    first = split.holders[0]
    activities = Counter(each.doing.activity for each in split.holders)
    activity = activities.most_common(1)[0][0]
    doing = next(each.doing for each in split.holders if each.doing.activity is activity)
    root = _ROOTS.get(activity, RootClass.AMBIGUOUS)
    outside = doing.part in _OUTSIDE or activity in _OUTSIDE
    asleep = any(each.dump.state == "D" for each in split.holders)
    if asleep:
        root = RootClass.INFRASTRUCTURE
    elif outside and root is RootClass.USER_CODE:
        root = RootClass.AMBIGUOUS
    ask = activity in _ASK and not outside and not asleep
    machine = _one_machine(split)
    text = f"{_names(split.holders)} {_is(split.holders)} {doing}{_workers(split.holders)}"
    if asleep:
        text += ", asleep in the kernel (state D)"
    text += (
        f", while {len(split.waiting)} of {len(split.seen)} processes wait {_where(split.waiting)}"
    )
    if machine:
        text += f"; these are all processes of {machine}"
    sure = activity not in _UNSURE and not all(_on_the_way(e, split) for e in split.holders)
    return _finding(
        "stacks.outlier",
        first,
        attempt,
        text,
        _Take(
            root=root,
            action=_action_for(activity, doing, ask=ask),
            ranks=_ranks(split.holders) if sure else (),
            machines=(machine,)
            if machine and sure and (outside or asleep or activity is Activity.DEVICE)
            else (),
            undecided=_decides(activity, doing),
        ),
    )


def _action_for(activity: Activity, doing: Doing, *, ask: bool) -> FirstAction:
    if ask:
        return FirstAction.ASK_USER
    if Activity.REMOTE in {activity, doing.part}:
        return FirstAction.RETRY
    return FirstAction.STOP_TIME_CHECK


def _on_the_way(each: Seen, split: Split) -> bool:
    """Whether one in code that shows no wait is in a function that leads the others to theirs.

    Then it may be before or after their collective, in one that the dump does not show.
    """
    if each.doing.activity is not Activity.CODE or each.dump.main is None:
        return False
    passed = {
        (plain(frame.name), frame.file)
        for other in split.waiting
        if other.dump.main is not None
        for frame in other.dump.main.frames
    }
    frame = each.dump.main.frames[0]
    return (plain(frame.name), frame.file) in passed


def _decides(activity: Activity, doing: Doing) -> str:
    if activity in HIDES:
        return (
            "a native stack (py-spy dump --native) or a flight record: the rank may wait in a"
            " collective that Python does not show"
        )
    if activity is Activity.EXIT:
        return "the count of batches of each rank: it may have had fewer"
    if activity in {Activity.EVALUATE, Activity.SAVE, Activity.COMPILE}:
        return (
            "whether it moves on in a second dump: it may only be slow, and the time-out too short"
        )
    if doing.part in _OUTSIDE or activity in _OUTSIDE:
        return "whether the same path can be read on its machine and on others"
    return "the same rank again on another machine would be software, the same machine hardware"


def _many(split: Split, attempt: int) -> Finding:
    """Neither side is small."""
    text = (
        f"{len(split.holders)} of {len(split.seen)} processes are {_where(split.holders)}, and"
        f" {len(split.waiting)} wait {_where(split.waiting)}: neither side is small enough to be"
        " the outlier"
    )
    activities = {each.doing.activity for each in split.holders}
    ask = activities <= _ASK
    return _finding(
        "stacks.split",
        split.holders[0],
        attempt,
        text,
        _Take(
            root=RootClass.USER_CODE if ask else RootClass.AMBIGUOUS,
            action=FirstAction.ASK_USER if ask else FirstAction.STOP_TIME_CHECK,
            undecided="a flight record of every rank",
        ),
    )


def _layout(split: Split, attempt: int) -> Finding:
    count = len(split.holders) // len({each.machine for each in split.seen})
    text = (
        f"on every machine {count} of its processes {'are' if count > 1 else 'is'}"
        f" {_where(split.holders)} while the others wait {_where(split.waiting)}: a split that is"
        " the same everywhere follows the layout or the program, no machine"
    )
    return _finding(
        "stacks.layout",
        split.holders[0],
        attempt,
        text,
        _Take(
            undecided="a flight record of every rank: which of the two parts is ahead",
        ),
    )


def _all_hold(split: Split, attempt: int) -> Finding:
    """Nobody waits for others: all are busy, or all are blocked for the same reason."""
    activities = Counter(each.doing.activity for each in split.holders)
    activity, count = activities.most_common(1)[0]
    one = next(each for each in split.holders if each.doing.activity is activity)
    outside = [e for e in split.holders if {e.doing.activity, e.doing.part} & _OUTSIDE]
    root, action = _ROOTS.get(activity, RootClass.AMBIGUOUS), FirstAction.STOP_TIME_CHECK
    if len(outside) > len(split.holders) // 2 and len(split.seen) > 1:
        root, action = RootClass.TRANSIENT, FirstAction.RETRY
    elif root is RootClass.USER_CODE:
        action = FirstAction.ASK_USER
    text = f"{count} of {len(split.seen)} processes are {one.doing}{_workers([one])}"
    if len(split.seen) > 1:
        text += "; none waits for another one, so nobody is an outlier"
    return _finding(
        "stacks.all_busy",
        one,
        attempt,
        text,
        _Take(
            root=root,
            action=action,
            undecided="a second dump: whether the stacks move",
        ),
    )


def _all_wait(split: Split, attempt: int) -> Finding:
    groups = Counter(
        (each.doing.activity, each.doing.call, each.doing.at) for each in split.waiting
    )
    first = split.waiting[0]
    code = [e for e in split.waiting if e.doing.part in {Activity.SAVE, Activity.EVALUATE}]
    root, action = RootClass.AMBIGUOUS, FirstAction.STOP_TIME_CHECK
    if len(groups) == 1:
        text = f"all {len(split.seen)} processes are {first.doing}: nobody is an outlier"
        rule, undecided = (
            "stacks.alike",
            "a flight record: whether all have joined the same collective",
        )
    elif _on_every_machine(
        split, [e for e in split.waiting if _group(e) != groups.most_common(1)[0][0]]
    ):
        text = (
            f"the processes wait in {len(groups)} places, with the same division on every machine"
            f" ({_where(split.waiting)}): it follows the layout or the program, no machine"
        )
        rule, undecided = "stacks.layout", "a flight record of every rank: which part is ahead"
    else:
        text = (
            f"all {len(split.seen)} processes wait for others, {_where(split.waiting)}: a process"
            " that waits holds nobody up by itself, and neither side need be the one that is behind"
        )
        rule, undecided = "stacks.camps", "a flight record of every rank: sequence numbers by group"
        if code and len(code) < len(split.waiting):
            root, action = RootClass.USER_CODE, FirstAction.ASK_USER
            text += (
                f"; {len(code)} of them {_where(code)}, so ranks went different ways in the code"
            )
    take = _Take(root=root, action=action, undecided=undecided)
    return _finding(rule, first, attempt, text, take)


def _missing(split: Split, site: Site, attempt: int) -> Finding | None:
    """All that were dumped wait, and some were not."""
    ranks = _ranks(split.seen)
    if not ranks:
        return _short_machine(split, site, attempt)
    if len(ranks) != len(split.seen) or site.size <= len(ranks):
        return None
    absent = tuple(Rank(rank) for rank in range(site.size) if rank not in ranks)
    hosts = {site.host_of(rank) for rank in absent}
    per = site.ranks_per_machine or 0
    whole = len(hosts) == 1 and None not in hosts and len(absent) == per
    known = (len(absent) == 1 or whole) and len(absent) <= max(1, FEW * site.size)
    text = (
        f"all {len(ranks)} processes with a stack wait {_where(split.waiting)}, and"
        f" {len(absent)} of {site.size} ranks ({_list(absent)}) without: ended, or out of reach"
    )
    return _finding(
        "stacks.missing",
        split.waiting[0],
        attempt,
        text,
        _Take(
            ranks=absent if known else (),
            undecided="whether the processes of the ranks without a stack still live",
        ),
    )


def _short_machine(split: Split, site: Site, attempt: int) -> Finding | None:
    """The one machine of several with fewer stacks than the others, where ranks are not known."""
    per = site.ranks_per_machine or 0
    counts = Counter(each.dump.machine for each in split.seen)
    short = [host for host in site.hosts if counts[host] < per]
    if (
        len(short) != 1
        or len(site.hosts) < 3
        or sum(counts.values()) != sum(counts[host] for host in site.hosts)
    ):
        return None
    text = (
        f"all {len(split.seen)} processes with a stack wait {_where(split.waiting)}, and"
        f" {short[0]} shows {counts[short[0]]} of {per}: the others ended, or are out of reach"
    )
    take = _Take(machines=(short[0],), undecided="whether these processes still live")
    return _finding("stacks.missing", split.waiting[0], attempt, text, take)


def _history(splits: Sequence[Split], findings: Sequence[Finding]) -> Finding | None:
    """The same outlier twice: software goes with the rank, hardware stays with the machine."""
    told = [
        (split, finding)
        for split in splits
        for finding in findings
        if finding.rule == "stacks.outlier" and splits[finding.attempt] is split
    ]
    if len(told) < 2:
        return None
    (before, _), (after, last) = told[-2:]
    ranks = set(_ranks(before.holders)) & set(_ranks(after.holders))
    old, new = ({e.dump.machine for e in split.holders} - {None} for split in (before, after))
    machines = {name for name in old & new if name is not None}
    text, root, accused = last.why, last.root, tuple(sorted(ranks))
    blamed: tuple[str, ...] = ()
    undecided = ""
    if ranks and old and new and not machines:
        text += (
            f"; the same rank was so before on {_list(sorted(map(str, old)))}, now on"
            f" {_list(sorted(map(str, new)))}: it goes with the rank, so it is software"
        )
        root = RootClass.USER_CODE
    elif machines and not ranks:
        text += (
            f"; before it was another rank of {_list(sorted(machines))}: it stays with the machine"
        )
        root, blamed = RootClass.INFRASTRUCTURE, tuple(sorted(machines))
    elif not ranks and old and new:
        text += f"; before it was {_names(before.holders)}: neither rank nor machine is the same"
        root, undecided = RootClass.AMBIGUOUS, "a third time"
    else:
        text += "; it was the same before"
        undecided = last.undecided
    return _changed(last, why=text, root=root, ranks=accused, machines=blamed, undecided=undecided)


def _changed(
    finding: Finding,
    *,
    why: str,
    root: RootClass,
    ranks: tuple[Rank, ...],
    machines: tuple[str, ...],
    undecided: str,
) -> Finding:
    return msgspec.structs.replace(
        finding,
        rule="stacks.history",
        why=why,
        root=root,
        accused_ranks=ranks,
        accused_machines=machines,
        undecided=undecided,
    )


# Words


def _finding(rule: str, about: Seen, attempt: int, why: str, take: _Take) -> Finding:
    healthy = take.root is RootClass.NONE
    return Finding(
        rule=rule,
        role=Role.NOISE if healthy else Role.ROOT,
        category=Category.NONE if healthy else Category.JOB_HANG,
        root=take.root,
        grade=Grade.WAITING,
        action=take.action,
        why=why,
        place=about.dump.place,
        speaker=Speaker(rank=about.dump.rank, machine=about.dump.machine, pid=about.dump.pid),
        accused_ranks=take.ranks,
        accused_machines=take.machines,
        attempt=attempt,
        undecided=take.undecided,
    )


def _group(each: Seen) -> tuple[Activity, str, str]:
    return (each.doing.activity, each.doing.call, each.doing.at)


def _ranks(seen: Iterable[Seen]) -> tuple[Rank, ...]:
    return tuple(sorted(each.dump.rank for each in seen if each.dump.rank is not None))


def _on_every_machine(split: Split, part: Sequence[Seen]) -> bool:
    """Whether each of several machines has the same number of a part, and none has it whole."""
    machines = Counter(each.machine for each in split.seen)
    of_part = Counter(each.machine for each in part)
    return (
        len(machines) > 1
        and set(of_part) == set(machines)
        and len(set(of_part.values())) == 1
        and all(of_part[name] < machines[name] for name in machines)
    )


def _one_machine(split: Split) -> str | None:
    """The machine whose processes are the holders, all of them and no others."""
    names = {each.dump.machine for each in split.holders}
    name = next(iter(names))
    whole = [each for each in split.seen if each.dump.machine == name]
    if len(names) > 1 or name is None or len(whole) != len(split.holders) or len(whole) < 2:
        return None
    return name


def _workers(holders: Sequence[Seen]) -> str:
    """What the workers of a loader do, if the dump shows them and they do something."""
    for each in holders:
        for worker in each.workers:
            done = doing(worker)
            if done.part is not Activity.LOCK and done.activity is not Activity.UNSEEN and done.at:
                return f" (its worker {worker.pid} is at {done.at})"
    return ""


def _names(seen: Sequence[Seen]) -> str:
    names = [each.name for each in seen[:4]]
    return ", ".join(names) + (f" and {len(seen) - 4} more" if len(seen) > 4 else "")


def _is(seen: Sequence[Seen]) -> str:
    return "is" if len(seen) == 1 else "are"


def _list(items: Iterable[object]) -> str:
    items = list(items)
    return ", ".join(map(str, items[:8])) + (" ..." if len(items) > 8 else "")


def _where(seen: Sequence[Seen]) -> str:
    groups = Counter(f"{each.doing}" for each in seen).most_common(3)
    if len(groups) == 1:
        return groups[0][0]
    return " and ".join(f"{text} ({count})" for text, count in groups)
