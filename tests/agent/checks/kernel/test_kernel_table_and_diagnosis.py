"""A kernel line that evicts while a job runs must mean the same in the files of a dead one.

Two tables know kernel lines: kernel.toml says whose device or process a line names, diagnosis'
own rules say what broke. This holds them together.
"""

from __future__ import annotations

import re

import pytest

from everstep.agent.checks.kernel.table import KernelRule, own_table
from everstep.diagnosis.rules import Rule
from everstep.diagnosis.tables import own_rules
from everstep.diagnosis.words import Category, Role, Verdict

GRAVE = [rule for rule in own_table().rules if rule.verdict is Verdict.EVICT]


def _says(rule: Rule, line: str) -> bool:
    said = any(re.search(pattern, line) for pattern in rule.match)
    return said and not any(re.search(pattern, line) for pattern in rule.unless)


@pytest.mark.parametrize("rule", GRAVE, ids=lambda rule: rule.id)
def test_diagnosis_takes_every_example_for_a_cause_of_the_same_kind(rule: KernelRule) -> None:
    for example in rule.examples:
        found: set[Category] = {
            each.category
            for each in own_rules().rule
            if each.role is Role.ROOT and _says(each, example)
        }
        assert rule.category in found, example


def test_there_are_rules_that_evict() -> None:
    assert len(GRAVE) > 10
