"""The rules of the kernel log as data: kernel.toml, and how a line is found in it.

kmsg.py asks `match` for each record, so it must be quick: all patterns are one, which a line that
nobody knows leaves at its first letters. Checks judge by what the rule says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from importlib import resources

import msgspec

from everstep.agent.checks.kernel.records import Record, device_of, text_of, unescaped
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Counts
from everstep.model import Seconds, UserError, Value

NAME_MAX = 256
"""Characters of a name in a line: long enough for paths of cgroups."""


_GROUP = re.compile(r"\(\?P<\w+>")


class About(StrEnum):
    """What a line speaks of, which must be the job's for the machine to be accused."""

    PCI = "pci"
    """The device at the address in the group `pci`."""
    PID = "pid"
    """The process in the group `pid`."""
    CGROUP = "cgroup"
    """The group `cgroup`."""
    DISK = "disk"
    """The disk, partition or controller in the group `disk`."""
    INTERFACE = "interface"
    """The network interface in the group `interface`, or the device in the group `pci`."""
    MOUNT = "mount"
    """The server of a network file system in the group `server`."""
    HOST = "host"
    """The whole machine, and so all who use it."""


class KernelRule(Value, frozen=True, kw_only=True):
    """One kind of line."""

    id: str
    source: str
    """Where the line is from, and who says that it is grave."""
    match: tuple[str, ...]
    """Patterns, of which one must be found. They begin with "^" and are tried where the line
    begins; their groups say what it is about."""
    unless: tuple[str, ...] = ()
    about: About
    check: str = "kernel.log"
    """Who judges it."""
    verdict: Verdict = Verdict.INFO
    category: Category = Category.NONE
    counts: Counts = Counts.NEVER
    why: str
    """What it means, as a clause."""
    do: str = ""
    n: int = 1
    """Lines about the same thing that are needed for the verdict."""
    within_s: Seconds = 0.0
    """Seconds in which they must come."""
    fewer: Verdict = Verdict.WARN
    """The verdict while they are fewer."""
    healed_by: str = ""
    """Id of the rule whose line about the same thing says that it is over."""
    patience_s: Seconds = 0.0
    """Seconds that it may take to heal before it has the verdict."""
    fresh_s: Seconds = 600.0
    """Seconds for which a line counts. What sticks for longer keeps repaired machines away."""
    examples: tuple[str, ...]
    counterexamples: tuple[str, ...] = ()


class _File(Value, frozen=True, kw_only=True):
    version: str
    rule: tuple[KernelRule, ...]


class KernelTable:
    """All rules, ready to be asked."""

    def __init__(self, version: str, rules: tuple[KernelRule, ...]) -> None:
        self.version = version
        self.rules = rules
        self.of: Mapping[str, KernelRule] = {rule.id: rule for rule in rules}
        self.place: Mapping[str, int] = {rule.id: place for place, rule in enumerate(rules)}
        self._compiled = {
            rule.id: ([re.compile(one) for one in rule.match], list(map(re.compile, rule.unless)))
            for rule in rules
        }
        every = (_GROUP.sub("(?:", one) for rule in rules for one in rule.match)
        self._any = re.compile("|".join(f"(?:{one})" for one in every).encode())

    def match(self, record: Record) -> tuple[KernelRule, dict[str, str], str] | None:
        """The first rule that knows this record, what its line names, and the line's text."""
        if not self._any.match(unescaped(record.body)):
            return None
        text = text_of(record.body)
        for rule in self.rules:
            names = self._names(rule, text)
            if names is not None:
                return rule, {**device_of(record.tail), **names}, text
        return None

    def _names(self, rule: KernelRule, text: str) -> dict[str, str] | None:
        patterns, unless = self._compiled[rule.id]
        for pattern in patterns:
            found = pattern.match(text)
            if found is not None and not any(other.search(text) for other in unless):
                named = found.groupdict()
                return {name: value[:NAME_MAX] for name, value in named.items() if value}
        return None


def parse_table(text: str) -> KernelTable:
    """A table from TOML. Raises UserError that names the mistake."""
    try:
        found = msgspec.toml.decode(text.encode(), type=_File)
        return KernelTable(found.version, found.rule)
    except (msgspec.MsgspecError, re.error) as error:
        raise UserError(f"the table of kernel lines cannot be read: {error}") from error


@cache
def own_table() -> KernelTable:
    """The table that comes with everstep."""
    file = resources.files("everstep.agent.checks.kernel").joinpath("kernel.toml")
    return parse_table(file.read_text("utf-8"))
