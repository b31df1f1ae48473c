"""Ranks that waited in vain: who is missing among those that say so.

Used by judge.py when no root was found. Whoever prints a time-out is a victim: it was there. The
silent rank among printing ones is suspect, and a peer that a message names is more so. A watchdog's
own abort is a consequence.
"""

from __future__ import annotations

from collections.abc import Sequence

from everstep.diagnosis.answer import Answer
from everstep.diagnosis.causes import Cause, Course
from everstep.diagnosis.rules import Accuses, Means
from everstep.diagnosis.seen import Marked
from everstep.diagnosis.who import Who
from everstep.diagnosis.words import Category, FirstAction, Role, RootClass
from everstep.model import Rank

SILENT_SHARE = 0.25
"""More silent ranks than this share say nothing: their output may just be missing."""


def judge_waiting(
    causes: Sequence[Cause],
    marks: Sequence[Marked],
    course: Course,
    who: Who,
) -> Answer:
    """A hang, or a consequence whose cause lies outside these texts."""
    order = sorted(causes, key=_importance)
    first = order[0].first
    witnesses = [c for c in order if c.first.category is Category.JOB_HANG]
    named = _named(order)
    silent = _silent(witnesses, course, who)
    saving = any(mark.means is Means.SAVING for mark in marks)
    accused = named or silent
    root, action = RootClass.AMBIGUOUS, FirstAction.STOP_TIME_CHECK
    if not witnesses and first.role is Role.CONFIRM:
        root, action = first.root, first.action
    if saving and witnesses:
        root = RootClass.USER_CODE
        action = FirstAction.ASK_USER
    category = first.category if first.category is not Category.NONE else Category.JOB_HANG
    return Answer(
        category=category,
        root_class=root,
        first_action=action,
        accused_ranks=accused,
        confidence=0.5 if accused else 0.3,
        evidence=tuple(cause.first for cause in order[:8]),
        why=_why(order, named, silent, saving=saving),
        would_change=(
            "stacks of the ranks that printed nothing",
            "a flight recorder's dump of every rank",
        ),
    )


def _importance(cause: Cause) -> tuple[bool, bool]:
    first = cause.first
    return first.category is not Category.JOB_HANG, first.role is not Role.CONFIRM


def _named(causes: Sequence[Cause]) -> tuple[Rank, ...]:
    """Ranks that the messages themselves wait for."""
    ranks: dict[Rank, None] = {}
    for cause in causes:
        if cause.accuses is not Accuses.NAMED:
            continue
        for name in (name for each in cause.findings for name in each.named):
            if name.startswith("rank "):
                ranks[Rank(int(name.removeprefix("rank ")))] = None
    printed = {rank for cause in causes for rank in cause.ranks}
    return tuple(rank for rank in ranks if rank not in printed)


def _silent(causes: Sequence[Cause], course: Course, who: Who) -> tuple[Rank, ...]:
    size = max(course.site.size, who.world_size)
    printed = {rank for cause in causes for rank in cause.ranks}
    silent = [Rank(rank) for rank in range(size) if rank not in printed]
    if not printed or not silent or len(silent) > max(1, SILENT_SHARE * size):
        return ()
    return tuple(silent)


def _why(
    causes: Sequence[Cause], named: Sequence[Rank], silent: Sequence[Rank], *, saving: bool
) -> str:
    text = causes[0].first.why or "ranks waited for each other in vain"
    if named:
        text += f"; the messages wait for rank {_list(named)}"
    elif silent:
        text += f"; only rank {_list(silent)} printed no time-out"
    if saving:
        text += "; a checkpoint was being saved when it began"
    return f"{text}."


def _list(ranks: Sequence[Rank]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
