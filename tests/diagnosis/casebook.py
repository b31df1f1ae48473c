"""The failure cases: inputs as users have them, the right answers, and how answers are marked.

Used by test_cases.py and by scripts/cases.py, which prints the table of `make cases`.
"""

from __future__ import annotations

import gzip
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from everstep.diagnosis.answer import Answer
from everstep.diagnosis.findings import Site
from everstep.diagnosis.investigation import Investigation
from everstep.diagnosis.logs import Patterns
from everstep.diagnosis.tables import own_grades, own_rules
from everstep.diagnosis.words import FirstAction

CASES = Path(__file__).parent / "cases"
EXPECTED = "expect.toml"
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Case:
    """One failure and its right answer."""

    name: str
    folder: Path
    expect: dict[str, Any]

    @property
    def site(self) -> Site:
        known = self.expect.get("layout", {})
        return Site(
            world_size=known.get("world_size"),
            ranks_per_machine=known.get("ranks_per_machine"),
            hosts=tuple(known.get("hosts", ())),
        )

    def words(self, best: str, also: str) -> set[str]:
        """The best answer and those that are as good."""
        return {self.expect[best], *self.expect.get(also, [])}

    def known(self, what: str) -> set[Any]:
        """Whom an answer may accuse: "ranks" or "machines"."""
        group = self.expect.get("accused_group", {})
        return {
            *self.expect.get(f"accused_{what}", []),
            *self.expect.get(f"tolerated_{what}", []),
            *group.get(what, []),
        }


@dataclass(frozen=True)
class Mark:
    """What an answer to a case is worth."""

    category: bool
    action: bool
    innocent: bool
    """Nobody innocent was accused."""
    false_eviction: bool
    false_rollback: bool
    false_alarm: bool
    missed: bool
    root: bool
    culprits_named: int
    culprits: int

    @property
    def full(self) -> bool:
        return self.category and self.action and self.innocent


def cases(folder: Path = CASES) -> Iterator[Case]:
    """All of them, by name."""
    for expected in sorted(folder.glob(f"*/{EXPECTED}")):
        yield Case(
            name=expected.parent.name,
            folder=expected.parent,
            expect=tomllib.loads(expected.read_text("utf-8")),
        )


@cache
def _patterns() -> Patterns:
    return Patterns(own_rules())


def answer_to(case: Case) -> Answer:
    """What diagnosis says to the files of a case."""
    inquiry = Investigation(own_rules(), own_grades(), case.site, _patterns())
    for file in sorted(case.folder.rglob("*")):
        if file.is_dir() or file.name == EXPECTED:
            continue
        raw = file.read_bytes()
        data = gzip.decompress(raw) if file.suffix == ".gz" else raw
        text = inquiry.open(str(file.relative_to(case.folder)), len(data))
        for at in range(0, len(data), CHUNK_BYTES):
            text.feed(data[at : at + CHUNK_BYTES])
        inquiry.close(text)
    return inquiry.answer()


def mark(case: Case, answer: Answer) -> Mark:
    """By the rules of the cases: category, action, and nobody innocent accused."""
    actions = case.words("first_action", "acceptable_actions")
    innocent = set(answer.accused_ranks) <= case.known("ranks") and set(
        answer.accused_machines
    ) <= case.known("machines")
    evicts = answer.first_action is FirstAction.EVICT_MACHINE
    harmless = actions <= {FirstAction.NONE, FirstAction.RETRY}
    culprits = {*case.expect.get("accused_ranks", []), *case.expect.get("accused_machines", [])}
    named = culprits & {*answer.accused_ranks, *answer.accused_machines}
    return Mark(
        category=answer.category in case.words("category", "also_acceptable"),
        action=answer.first_action in actions,
        innocent=innocent,
        false_eviction=evicts and (answer.first_action not in actions or not innocent),
        false_rollback=answer.first_action is FirstAction.ROLL_BACK_CODE
        and answer.first_action not in actions,
        false_alarm=harmless and answer.first_action not in {FirstAction.NONE, FirstAction.RETRY},
        missed=answer.first_action is FirstAction.NONE and answer.first_action not in actions,
        root=answer.root_class == case.expect["root_class"],
        culprits_named=len(named),
        culprits=len(culprits),
    )
