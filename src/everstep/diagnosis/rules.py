"""Rules as data: what a line says about the cause of a failure.

The tables in tables/*.toml hold them; a site adds or overrides some with a file of the same form.
logs.py looks for their patterns, judge.py reads the rest. Every rule carries its own examples and
counterexamples, which are its tests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from everstep.diagnosis.findings import Finding, Place, Speaker
from everstep.diagnosis.words import (
    ACTION_OF,
    Category,
    FirstAction,
    Grade,
    Role,
    RootClass,
    Verdict,
)
from everstep.model import Seconds, UserError, Value


class Accuses(StrEnum):
    """Whom a rule's line speaks about, if anybody."""

    NOBODY = "nobody"
    PRINTER = "printer"
    """The rank and the machine that printed it."""
    MACHINE = "machine"
    """The machine that printed it, but no rank: its kernel, its disk."""
    NAMED = "named"
    """Who stands in the groups `rank`, `machine` or `address` of its pattern."""


class Spread(StrEnum):
    """Over whom a cause was seen."""

    ONE_MACHINE = "one_machine"
    """On one of several machines."""
    WHOLE_MACHINE = "whole_machine"
    """On one of several machines, and on most of its ranks: not what a single rank does for all."""
    SEVERAL_MACHINES = "several_machines"
    ALL_RANKS = "all_ranks"


class Phase(StrEnum):
    """Where the job was."""

    START = "start"
    """Before its first step."""
    RUNNING = "running"


class Case(Value, frozen=True, kw_only=True):
    """Circumstances under which a rule's answer is another one. All that are given must hold."""

    spread: Spread | None = None
    phase: Phase | None = None
    beside: str = ""
    """Id, or its beginning, of a rule that was also found: "kernel.oom"."""
    without: str = ""
    """Id, or its beginning, of a rule that was not found."""
    fresh_code: bool | None = None
    """The texts say that code, image or configuration had just changed."""
    says: str = ""
    """A pattern in the line itself."""
    trait: str = ""
    """Of its traceback: see tracebacks.Trace."""

    role: Role | None = None
    category: Category | None = None
    root: RootClass | None = None
    grade: Grade | None = None
    verdict: Verdict | None = None
    action: FirstAction | None = None
    accuses: Accuses | None = None
    why: str = ""


class Rule(Value, frozen=True, kw_only=True):
    """One kind of line."""

    id: str
    source: str
    """Where the fact is from: the software that prints it, a document."""
    match: tuple[str, ...] = ()
    """Patterns; one of them must be found in a line. They may name groups (see NAMED). None: the
    rule is of an exit code."""
    unless: tuple[str, ...] = ()
    """Patterns that must not be in the line."""
    role: Role
    category: Category = Category.NONE
    root: RootClass = RootClass.NONE
    grade: Grade = Grade.WAITING
    verdict: Verdict = Verdict.INFO
    action: FirstAction | None = None
    """Where the verdict's usual action is not the right one."""
    accuses: Accuses = Accuses.NOBODY
    why: str = ""
    """What it means, as a sentence for people without its full stop."""
    undecided: str = ""
    """What would decide, if it is ambiguous."""
    healed_by: str = ""
    """Id of the rule whose line says that it is over: later, in the same text, same machine."""
    last_resort: bool = False
    """Speaks only about lines of which no other rule does."""
    cases: tuple[Case, ...] = ()
    """The first that holds replaces what it names."""
    examples: tuple[str, ...] = ()
    counterexamples: tuple[str, ...] = ()

    @property
    def first_action(self) -> FirstAction:
        return self.action if self.action is not None else ACTION_OF[self.verdict]

    def finding(
        self, place: Place | None, speaker: Speaker, attempt: int, at: Seconds | None = None
    ) -> Finding:
        """What this rule says about what was found there; `at` is the line's own time."""
        return Finding(
            rule=self.id,
            role=self.role,
            category=self.category,
            root=self.root,
            grade=self.grade,
            action=self.first_action,
            why=self.why,
            place=place,
            speaker=speaker,
            at=at,
            attempt=attempt,
            undecided=self.undecided,
        )

    def under(self, case: Case) -> Rule:
        """The rule as it is under these circumstances."""
        changes = {
            name: value
            for name in ("role", "category", "root", "grade", "verdict", "action", "accuses", "why")
            if (value := getattr(case, name)) not in {None, ""}
        }
        if case.verdict is not None and case.action is None:
            changes["action"] = None
        return msgspec.structs.replace(self, **changes)


class Means(StrEnum):
    """What a mark tells about the course of a job."""

    RESTART = "restart"
    """Another attempt begins."""
    FINISHED = "finished"
    """The job says that it has ended, and well."""
    SAVING = "saving"
    FRESH_CODE = "fresh_code"
    """Code, image, library or configuration is another one than before."""
    EXIT = "exit"
    """Says how a process ended: exits.py reads it."""
    MACHINE = "machine"
    """Says whose text the following is: `kubectl describe node`, a comment."""
    IDENTITY = "identity"
    """Says which rank, process, address or machine belong together."""
    TASKS = "tasks"
    """Says how much memory a process had when the kernel looked for one to kill: tasks.py."""
    WAITS = "waits"
    """Says where a rank stands in its collectives: ledger.py reads it."""


class Mark(Value, frozen=True, kw_only=True):
    """A line that says where a job stands, and is no failure."""

    id: str
    match: tuple[str, ...]
    unless: tuple[str, ...] = ()
    means: Means
    examples: tuple[str, ...]
    counterexamples: tuple[str, ...] = ()


class XidClass(StrEnum):
    """What to do about an XID, in the vendor's and the fleets' words."""

    RESTART_APP = "restart_app"
    USER_CODE = "user_code"
    IGNORE = "ignore"
    """An echo or a notice."""
    RESET_GPU = "reset_gpu"
    EVICT_MACHINE = "evict_machine"
    CONTACT_SUPPORT = "contact_support"
    PER_TEXT = "per_text"
    """154: names the recovery itself."""


class Xid(Value, frozen=True, kw_only=True):
    """Some of the numbers with which NVIDIA's driver reports errors of a GPU."""

    codes: tuple[int, ...]
    meaning: str
    suspicion: str
    class_: XidClass = msgspec.field(name="class")


class Metric(Value, frozen=True, kw_only=True):
    """How a site's trainer reports its numbers: for forms that progress.py does not know."""

    match: str
    """A pattern with named groups: step, loss, grad_norm, step_s, tokens_per_s, tflops..."""


class Rules(Value, frozen=True, kw_only=True):
    """A table file, or all of them put together."""

    rule: tuple[Rule, ...] = ()
    mark: tuple[Mark, ...] = ()
    xid: tuple[Xid, ...] = ()
    metric: tuple[Metric, ...] = ()
    version: str = ""


class Pattern(Value, frozen=True, kw_only=True):
    """One pattern with what it belongs to; position in the list is its number in the scanner."""

    regex: str
    owner: Rule | Mark


def parse(text: str, where: str) -> Rules:
    """A table from TOML. Raises UserError that names the file and the mistake."""
    try:
        found = msgspec.toml.decode(text.encode(), type=Rules)
    except msgspec.MsgspecError as error:
        raise UserError(f"{where} is no table of rules: {error}") from error
    entries: tuple[Rule | Mark, ...] = (*found.rule, *found.mark)
    for entry in entries:
        for regex in (*entry.match, *entry.unless):
            try:
                re.compile(regex)
            except re.error as error:
                raise UserError(f"{where}: {entry.id}: {regex!r} is no pattern: {error}") from error
    return found


def together(tables: Sequence[Rules]) -> Rules:
    """All tables as one; a later entry replaces an earlier one of the same id."""
    rules: dict[str, Rule] = {}
    marks: dict[str, Mark] = {}
    for table in tables:
        rules.update({entry.id: entry for entry in map(rule_of_xid, table.xid)})
        rules.update({entry.id: entry for entry in table.rule})
        marks.update({entry.id: entry for entry in table.mark})
    metrics = tuple(entry for table in tables for entry in table.metric)
    return Rules(rule=tuple(rules.values()), mark=tuple(marks.values()), metric=metrics)


def patterns_of(rules: Rules) -> list[Pattern]:
    """Every pattern that the scanner is to look for."""
    owners: tuple[Rule | Mark, ...] = (*rules.rule, *rules.mark)
    return [Pattern(regex=regex, owner=owner) for owner in owners for regex in owner.match]


def grades_from(text: str) -> Mapping[Grade, int]:
    """How much each grade counts, the most first. Raises UserError."""
    try:
        order = msgspec.toml.decode(text.encode(), type=dict[str, list[Grade]])["order"]
    except (msgspec.MsgspecError, KeyError) as error:
        raise UserError(f"the table of grades cannot be read: {error}") from error
    missing = set(Grade) - set(order)
    if missing:
        raise UserError(f"the table of grades lacks {', '.join(sorted(missing))}")
    return {grade: len(order) - at for at, grade in enumerate(order)}


# --- XIDs ----------------------------------------------------------------------------------------

_MEMORY_XIDS = frozenset({48, 63, 64, 92, 94, 95, 140, 171, 172, 175})
_SUSPECTS = {
    XidClass.RESTART_APP: (Role.ROOT, Grade.DEVICE, RootClass.AMBIGUOUS, Verdict.SUSPECT),
    XidClass.USER_CODE: (Role.ROOT, Grade.DEVICE, RootClass.AMBIGUOUS, Verdict.SUSPECT),
    XidClass.IGNORE: (Role.ECHO, Grade.DEVICE, RootClass.AMBIGUOUS, Verdict.INFO),
    XidClass.RESET_GPU: (Role.ROOT, Grade.HOST, RootClass.INFRASTRUCTURE, Verdict.EVICT),
    XidClass.EVICT_MACHINE: (Role.ROOT, Grade.HOST, RootClass.INFRASTRUCTURE, Verdict.EVICT),
    XidClass.CONTACT_SUPPORT: (Role.ROOT, Grade.DEVICE, RootClass.INFRASTRUCTURE, Verdict.SUSPECT),
    XidClass.PER_TEXT: (Role.CONFIRM, Grade.HOST, RootClass.AMBIGUOUS, Verdict.SUSPECT),
}


def rule_of_xid(xid: Xid) -> Rule:
    """The rule of an entry of the XID table; one for all its codes.

    An echo that names the XID which caused it speaks of that one.
    """
    role, grade, root, verdict = _SUSPECTS[xid.class_]
    numbers = "|".join(map(str, xid.codes))
    if xid.suspicion == "ambiguous" and verdict is Verdict.EVICT:
        grade, root, verdict = Grade.DEVICE, RootClass.AMBIGUOUS, Verdict.SUSPECT
    category = Category.GPU_UNAVAILABLE if grade is Grade.HOST else Category.CUDA_ERROR
    if set(xid.codes) & _MEMORY_XIDS:
        category = Category.GPU_MEMORY_ERROR
    own = rf"Xid \(PCI:[0-9a-fA-F:.]+\): (?:{numbers})\b"
    caused = rf"caused by previous Xid (?:{numbers})\b"
    return Rule(
        id=f"xid.{xid.codes[0]}",
        source="NVIDIA's catalogue of XIDs",
        match=(own, caused) if role is Role.ROOT else (own,),
        unless=() if role is Role.ROOT else ("caused by previous Xid",),
        role=role,
        category=category,
        root=root,
        grade=grade,
        verdict=verdict,
        accuses=Accuses.MACHINE if root is RootClass.INFRASTRUCTURE else Accuses.NOBODY,
        why=f"XID {numbers.replace('|', ', ')}: {xid.meaning}",
        undecided="the same GPU twice is the machine; many GPUs at once are the program"
        if root is RootClass.AMBIGUOUS
        else "",
        examples=(f"NVRM: Xid (PCI:0000:c1:00): {xid.codes[0]}, pid=1, name=python3",),
    )
