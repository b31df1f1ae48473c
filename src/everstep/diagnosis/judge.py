"""From everything that was found to one answer.

Called by investigation.py and, live, by the controller's evidence. The order of the decision:

1. what training survived is no cause; what somebody did on purpose is, if nothing failed before;
2. roots before consequences: the grade of a root counts, then its time (tables/grades.toml);
3. without a root, those who waited are witnesses: whoever the ledger (silence.py) or, where no
   operations were told, waiting.py finds silent is suspect;
4. without that, signals and exit codes, which prove little;
5. without anything, the job ended well or the answer is that we do not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everstep.diagnosis.accused import Accused, accused_by
from everstep.diagnosis.answer import Answer
from everstep.diagnosis.causes import Cause, Course, causes_of
from everstep.diagnosis.findings import Exit, Finding
from everstep.diagnosis.history import history
from everstep.diagnosis.rules import Means, Rule
from everstep.diagnosis.seen import Marked
from everstep.diagnosis.waiting import judge_waiting
from everstep.diagnosis.who import Who
from everstep.diagnosis.words import Category, FirstAction, Grade, Role, RootClass
from everstep.model import Value

EVIDENCE_LINES = 12
"""Shown at most; the rest is counted."""

_TELLING = {"exit.other": 3, "exit.-6": 2}
_CONFIDENCE = {
    RootClass.INFRASTRUCTURE: 0.85,
    RootClass.USER_CODE: 0.8,
    RootClass.TRANSIENT: 0.7,
    RootClass.AMBIGUOUS: 0.5,
    RootClass.NONE: 0.8,
}


class Facts(Value, frozen=True, kw_only=True):
    """What all texts of a job told."""

    findings: tuple[Finding, ...]
    marks: tuple[Marked, ...]
    exits: tuple[Exit, ...]
    course: Course

    @property
    def last_attempt(self) -> int:
        """The newest run that anything is known of."""
        of_findings = max((finding.attempt for finding in self.findings), default=0)
        return max(of_findings, max((mark.attempt for mark in self.marks), default=0))


def judge(facts: Facts, rules: Mapping[str, Rule], grades: Mapping[Grade, int], who: Who) -> Answer:
    """The answer."""
    ends = _ends(facts.exits, rules)
    causes = causes_of((*facts.findings, *ends), rules, who, facts.course)
    live = [cause for cause in causes if not _survived(cause, facts)]
    roots = [c for c in live if c.first.role is Role.ROOT and not _is_end(c)]
    rest = [c for c in live if c.first.role in {Role.CONFIRM, Role.ECHO}]
    ended = [c for c in live if _is_end(c)]
    witnesses = [c for c in rest if c.first.category is Category.JOB_HANG]
    if roots:
        best = _best(roots, grades)
        if best.first.grade is not Grade.EXIT or not any(_before(w, best) for w in witnesses):
            return _by_root(best, roots, rest, facts, who)
        waits = [cause for cause in roots if cause.first.grade is Grade.WAITING]
        if waits:
            return _by_root(waits[0], roots, rest, facts, who)
    if any(witness.first.role is Role.CONFIRM for witness in witnesses):
        return judge_waiting(rest, facts.marks, facts.course, who)
    if ended:
        return _by_root(_most_telling(ended), ended, rest, facts, who)
    if any(cause.first.category is not Category.NONE for cause in rest):
        return judge_waiting(rest, facts.marks, facts.course, who)
    return _nothing([c for c in causes if c.first.role is Role.ROOT and not _is_end(c)], facts)


# --- roots ---------------------------------------------------------------------------------------


def _survived(cause: Cause, facts: Facts) -> bool:
    """Training went on after it; or the job ended well, and it had ended a side thread, or had been
    survived before.
    """
    last = facts.last_attempt
    if max(cause.attempts) < last and _ended_well(facts, last) and not _failed(facts, last):
        return True
    if cause.first.grade is Grade.POLICY and max(cause.attempts) < last:
        return True  # and another attempt was made
    if cause.went_on and cause.first.grade not in {Grade.POLICY, Grade.NUMERIC, Grade.SPEED}:
        return True
    in_thread = all("in_thread" in finding.traits for finding in cause.findings)
    return (in_thread or cause.went_on_at_first) and _ended_well(facts) and not _failed(facts)


def _best(roots: Sequence[Cause], grades: Mapping[Grade, int]) -> Cause:
    """The root that explains the others."""
    order = sorted(
        enumerate(roots),
        key=lambda pair: (
            "chained" in pair[1].first.traits,
            -grades[pair[1].first.grade],
            min(pair[1].attempts),
            pair[1].at if _comparable(roots) else 0.0,
            pair[0],
        ),
    )
    best = order[0][1]
    if best.first.grade is not Grade.POLICY:
        return best
    before = [c for _, c in order if c is not best and _before(c, best) and _heavy(c, grades)]
    return before[0] if before else best


def _heavy(cause: Cause, grades: Mapping[Grade, int]) -> bool:
    return grades[cause.first.grade] >= grades[Grade.DEVICE]


def _before(cause: Cause, other: Cause) -> bool:
    """Whether it was clearly earlier: in time, else in the same text."""
    if cause.at is not None and other.at is not None:
        return cause.at < other.at
    here, there = cause.first.place, other.first.place
    return (
        here is not None
        and there is not None
        and here.file == there.file
        and here.line < there.line
    )


def _comparable(causes: Sequence[Cause]) -> bool:
    return all(cause.at is not None for cause in causes)


def _by_root(
    best: Cause, roots: Sequence[Cause], waiting: Sequence[Cause], facts: Facts, who: Who
) -> Answer:
    first = best.first
    accused = _with_history(accused_by(best, facts.course, who), best, roots)
    action = accused.action or first.action
    others = [cause for cause in (*roots, *waiting) if cause is not best]
    return Answer(
        category=first.category,
        root_class=accused.root or first.root,
        first_action=action,
        accused_ranks=accused.ranks,
        accused_machines=accused.machines,
        confidence=_confidence(best, roots),
        evidence=_evidence(best, others),
        why=_sentence(best, others, accused),
        would_change=_would_change(best, accused),
    )


def _with_history(accused: Accused, best: Cause, roots: Sequence[Cause]) -> Accused:
    runs = history(best, roots)
    if runs is None:
        return accused
    machines = (runs.machine,) if runs.machine is not None else ()
    return Accused(machines=machines, action=runs.action, root=runs.root, why=runs.why)


def _confidence(best: Cause, roots: Sequence[Cause]) -> float:
    base = _CONFIDENCE[best.first.root]
    rivals = {cause.first.category for cause in roots} - {best.first.category}
    return round(max(0.2, base - 0.1 * min(len(rivals), 3)), 2)


def _evidence(best: Cause, others: Sequence[Cause]) -> tuple[Finding, ...]:
    lines = [*best.findings[:5], *(cause.first for cause in others)]
    return tuple(lines[:EVIDENCE_LINES])


def _sentence(best: Cause, others: Sequence[Cause], accused: Accused) -> str:
    parts = [best.first.why or f"{best.rule} was found"]
    if best.times > 1:
        parts.append(f"seen {best.times} times")
    echoes = sum(cause.times for cause in others if cause.first.role is not Role.ROOT)
    if echoes:
        lines = "another line is" if echoes == 1 else f"{echoes} other lines are"
        parts.append(f"{lines} its consequence")
    if accused.why:
        parts.append(accused.why)
    return "; ".join(parts) + "."


def _would_change(best: Cause, accused: Accused) -> tuple[str, ...]:
    return tuple(text for text in (best.first.undecided, accused.undecided) if text)


# --- exits, and nothing --------------------------------------------------------------------------


def _ends(exits: Sequence[Exit], rules: Mapping[str, Rule]) -> list[Finding]:
    """The exit codes as findings; an orderly end, or one that was asked for, is none."""
    found = []
    for each in exits:
        rule = rules.get(f"exit.{each.code}") or rules.get("exit.other")
        if each.bad and rule is not None:
            found.append(rule.finding(each.place, each.speaker, each.attempt, each.at))
    return found


def _is_end(cause: Cause) -> bool:
    return cause.rule.startswith("exit.")


def _most_telling(ended: Sequence[Cause]) -> Cause:
    """A signal tells more than a code, and an abort, which watchdogs do, least of the signals."""
    return min(ended, key=lambda cause: _TELLING.get(cause.rule, 1))


def _failed(facts: Facts, attempt: int = 0) -> bool:
    return any(ended.bad and ended.attempt >= attempt for ended in facts.exits)


def _ended_well(facts: Facts, attempt: int = 0) -> bool:
    """Whether this attempt, or one after it, says that it ended, and well."""
    ends = [mark for mark in facts.marks if mark.means is Means.FINISHED]
    return any(mark.attempt >= attempt for mark in ends)


def _nothing(survived: Sequence[Cause], facts: Facts) -> Answer:
    """No cause was found."""
    if survived:
        # A side thread that died stays dead, so its service is worth a look; a retry that got
        # through is not.
        lasting = next((c.first for c in survived if "in_thread" in c.first.traits), None)
        external = lasting is not None and lasting.category is Category.EXTERNAL_SERVICE_ERROR
        return Answer(
            category=Category.EXTERNAL_SERVICE_ERROR if external else Category.NONE,
            root_class=RootClass.TRANSIENT if external else RootClass.NONE,
            first_action=FirstAction.NONE,
            confidence=0.8,
            evidence=tuple(cause.first for cause in survived[:EVIDENCE_LINES]),
            why="training went on after what looks like a failure, and nothing else ended it.",
        )
    if _failed(facts):
        return Answer(
            category=Category.USER_CODE_ERROR,
            root_class=RootClass.AMBIGUOUS,
            first_action=FirstAction.STOP_TIME_CHECK,
            confidence=0.1,
            why="processes failed, but no line says why.",
            would_change=("the output of the ranks that failed first",),
        )
    return Answer(
        category=Category.NONE,
        root_class=RootClass.NONE,
        first_action=FirstAction.NONE,
        confidence=0.8 if _ended_well(facts) else 0.3,
        why="no line speaks of a failure"
        + (", and the job says that it ended well." if _ended_well(facts) else "."),
    )
