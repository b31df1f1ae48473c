"""The rules of the kernel log find their examples, spare their counterexamples, and are quick."""

from __future__ import annotations

import re

import pytest

from everstep.agent.checks.kernel.records import Record
from everstep.agent.checks.kernel.table import About, KernelRule, own_table, parse_table
from everstep.agent.checks.registry import CHECKS
from everstep.diagnosis.words import Category, Verdict
from everstep.model import UserError

TABLE = own_table()
NAMED = {
    About.PCI: "pci",
    About.PID: "pid",
    About.CGROUP: "cgroup",
    About.DISK: "disk",
    About.MOUNT: "server",
}


BAD_PATTERN = """
version = "1"
[[rule]]
id = "x"
source = "x"
match = ["("]
about = "host"
why = "x"
examples = ["x"]
"""


def found(text: str) -> tuple[str, dict[str, str]]:
    match = TABLE.match(Record(4, 1, 1.0, text.encode(), b""))
    return ("", {}) if match is None else (match[0].id, match[1])


@pytest.mark.parametrize("rule", TABLE.rules, ids=[rule.id for rule in TABLE.rules])
def test_a_rule_finds_its_examples_and_spares_its_counterexamples(rule: KernelRule) -> None:
    assert rule.examples
    for example in rule.examples:
        assert found(example)[0] == rule.id, example
        if rule.about in NAMED and "uuid" not in found(example)[1]:
            assert NAMED[rule.about] in found(example)[1], example
    for other in rule.counterexamples:
        assert found(other)[0] != rule.id, other


@pytest.mark.parametrize("rule", TABLE.rules, ids=[rule.id for rule in TABLE.rules])
def test_a_rule_says_what_it_means_and_what_to_do(rule: KernelRule) -> None:
    assert rule.source
    assert rule.why
    assert rule.check in CHECKS
    assert all(one.startswith("^") for one in rule.match)
    if rule.verdict is not Verdict.INFO:
        assert rule.do.endswith(".")
        assert rule.category is not Category.NONE
    if rule.n > 1:
        assert rule.within_s > 0
    if rule.healed_by:
        assert rule.patience_s > 0
        assert rule.healed_by in TABLE.of


def test_ids_are_unique_and_the_table_has_a_version() -> None:
    assert len(TABLE.of) == len(TABLE.rules)
    assert TABLE.version


@pytest.mark.parametrize("rule", TABLE.rules, ids=[rule.id for rule in TABLE.rules])
def test_a_program_cannot_name_itself_like_a_line_of_the_kernel(rule: KernelRule) -> None:
    """Patterns begin where lines begin, so what a user may choose stands behind something else."""
    for example in rule.examples:
        assert found(f"audit: type=1326 exe={example}")[0] == ""


def test_what_is_escaped_is_read_as_text() -> None:
    line = "INFO: task caf\\xc3\\xa9:12 blocked for more than 120 seconds."
    assert found(line)[1]["comm"] == "café"


def test_a_device_that_only_the_tail_of_a_record_names_is_known() -> None:
    tail = b" SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0"
    match = TABLE.match(
        Record(3, 1, 1.0, b"NETDEV WATCHDOG: eth7 (x): transmit queue 3 timed out", tail)
    )
    assert match is not None
    assert match[1] == {"pci": "0000:3b:00.0", "interface": "eth7"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        'version = "1"',
        'version = "1"\n[[rule]]\nid = "x"',
        BAD_PATTERN,
    ],
)
def test_a_table_with_a_mistake_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_table(text)


def test_patterns_have_no_group_that_nobody_knows() -> None:
    groups = {
        name for rule in TABLE.rules for one in rule.match for name in re.compile(one).groupindex
    }
    known = {
        *NAMED.values(),
        "interface",
        "peer",
        "uuid",
        "code",
        "rest",
        "switch",
        "cpu",
        "seconds",
    }
    known |= {"comm", "library", "uid", "constraint", "limited", "where", "anon_kb", "times"}
    assert groups <= known | {"clock", "limit"}
