"""Every rule and mark of the tables finds its own examples and spares its counterexamples."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.diagnosis.logs import Patterns
from everstep.diagnosis.rules import Mark, Rule, parse, together
from everstep.diagnosis.scanner import Alternatives, Attentive, Hyperscan, Scanner
from everstep.diagnosis.tables import own_grades, own_rules
from everstep.diagnosis.words import FirstAction, Role, RootClass
from everstep.model import UserError

ENTRIES: list[Rule | Mark] = [*own_rules().rule, *own_rules().mark]
PATTERNS = Patterns(own_rules())
SLOW = Patterns(own_rules(), Alternatives)
WITH_PATTERNS = [entry for entry in ENTRIES if entry.match]


def speaks_about(patterns: Patterns, line: str) -> set[str]:
    """Ids of all entries that the scanner finds in a line, and that nothing rules out."""
    found = set()
    for hit in patterns.scanner.lines(line.encode()):
        for number in hit.patterns:
            owner = patterns.entries[number].owner
            if not any(other.search(line) for other in patterns.unless[owner.id]):
                found.add(owner.id)
    return found


@pytest.mark.parametrize("entry", WITH_PATTERNS, ids=[entry.id for entry in WITH_PATTERNS])
def test_an_entry_finds_its_examples_and_nothing_else(entry: Rule | Mark) -> None:
    assert entry.examples, "a rule without example is not tested"
    for example in entry.examples:
        assert entry.id in speaks_about(PATTERNS, example), example
    for other in entry.counterexamples:
        assert entry.id not in speaks_about(PATTERNS, other), other


def test_both_engines_find_the_same() -> None:
    lines = [line for entry in ENTRIES for line in (*entry.examples, *entry.counterexamples)]
    text = "\n".join(lines).encode()
    assert list(PATTERNS.scanner.lines(text)) == list(SLOW.scanner.lines(text))


def test_every_rule_says_what_it_means() -> None:
    for rule in own_rules().rule:
        assert rule.why, rule.id
        assert rule.source, rule.id
        if rule.root is RootClass.AMBIGUOUS and rule.role is Role.ROOT:
            assert rule.undecided, f"{rule.id} is ambiguous and does not say what decides"
        if rule.root is not RootClass.INFRASTRUCTURE and rule.role is Role.ROOT:
            assert rule.first_action is not FirstAction.EVICT_MACHINE, rule.id


def test_rules_without_patterns_are_those_that_several_lines_lead_to() -> None:
    found = {rule.id.split(".")[0] for rule in own_rules().rule if not rule.match}
    assert found == {"exit", "derived"}


def test_all_grades_are_ordered() -> None:
    order = own_grades()
    assert sorted(order.values(), reverse=True) == list(order.values())


SITE = """
[[rule]]
id = "cuda.ecc"
source = "ours"
match = ['BAD GPU \\d+']
role = "root"
grade = "hardware"
category = "gpu_memory_error"
root = "infrastructure"
verdict = "evict"
why = "our driver says so"
examples = ["BAD GPU 3"]
"""


def test_a_site_replaces_a_rule_and_adds_one() -> None:
    added = SITE.replace("cuda.ecc", "ours.new")
    rules = together((own_rules(), parse(SITE, "site.toml"), parse(added, "more.toml")))
    by_id = {rule.id: rule for rule in rules.rule}
    assert by_id["cuda.ecc"].match == (r"BAD GPU \d+",)
    assert len(rules.rule) == len(own_rules().rule) + 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[rule]]\nid = 3", "site.toml is no table of rules"),
        (SITE.replace("BAD GPU", "BAD (GPU"), "is no pattern"),
        (SITE.replace('"hardware"', '"heavy"'), "site.toml is no table of rules"),
    ],
)
def test_a_mistake_in_a_table_is_one_sentence(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse(text, "site.toml")


@given(st.lists(st.sampled_from([b"alpha 1", b"beta", b"", b"gamma", b"alpha beta"]), max_size=30))
def test_lines_are_found_wherever_they_end(lines: list[bytes]) -> None:
    patterns = [r"alpha (?P<number>\d)", "beta"]
    text = b"\n".join(lines)
    expected = [
        (line, tuple(n for n, p in enumerate(patterns) if re.search(p.encode(), line)))
        for line in lines
        if re.search(rb"alpha \d|beta", line)
    ]
    for engine in (Hyperscan, Alternatives):
        found = list(Scanner(patterns, engine).lines(text))
        assert [(text[line.start : line.end], line.patterns) for line in found] == expected


def test_an_attentive_reader_misses_nothing() -> None:
    attentive = Patterns(own_rules(), Attentive)
    for entry in own_rules().rule:
        for example in entry.examples:
            assert entry.id in speaks_about(attentive, example), f"no suspicious word: {example}"
            assert entry.id in speaks_about(attentive, example), "known forms lose nothing"
