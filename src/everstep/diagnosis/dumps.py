"""All kinds of dumps of one hang, taken from whoever has files, judged together.

`everstep diagnose` offers every input to `Dumps.take`; what it declines is a log. At the end
`findings` has one root: stacks say what a rank does, records say who waits for whom, and the more
telling of them speaks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from everstep.diagnosis.findings import Finding, Site
from everstep.diagnosis.flight import Flight
from everstep.diagnosis.ras import Ras
from everstep.diagnosis.report import Reports
from everstep.diagnosis.stacks import Stacks
from everstep.diagnosis.words import Role

_TELLING = (
    "stacks.history",
    "flight.different",
    "report.different",
    "stacks.outlier",
    "flight.circle",
    "flight.late",
    "report.late",
    "ras.dead",
    "ras.behind",
    "ras.silent",
    "flight.unfinished",
    "flight.absent",
    "stacks.missing",
    "stacks.all_busy",
    "flight.ahead",
    "report.ahead",
    "stacks.layout",
    "stacks.split",
    "ras.split",
    "stacks.camps",
    "flight.joined",
    "stacks.alike",
)
"""The most telling first. What is not named here tells least."""


class Collector(Protocol):
    """Takes the files of one kind of dump."""

    def take(self, file: str, data: bytes, attempt: int = 0) -> bool:
        """Keep it if it is of this kind."""

    def findings(self, site: Site) -> list[Finding]:
        """What was taken tells; at most one root, and that first."""


class Dumps:
    """Every kind of dump of one job."""

    def __init__(self) -> None:
        self._kinds: tuple[Collector, ...] = (Flight(), Ras(), Reports(), Stacks())

    def take(self, file: str, data: bytes, attempt: int = 0) -> bool:
        """Keep a file's dumps; False if it has none. A log may have some between its lines."""
        taken = [kind.take(file, data, attempt) for kind in self._kinds]
        return any(taken)

    def findings(self, site: Site) -> list[Finding]:
        """What all of them tell together, the root first."""
        return weighed(finding for kind in self._kinds for finding in kind.findings(site))


def weighed(findings: Iterable[Finding]) -> list[Finding]:
    """Those of several kinds together: one root, the most telling one, and that first."""
    found = sorted(findings, key=lambda each: (each.role is not Role.ROOT, _rank_of(each)))
    return [
        finding
        if at == 0 or finding.role is not Role.ROOT
        else msgspec.structs.replace(finding, role=Role.CONFIRM)
        for at, finding in enumerate(found)
    ]


def _rank_of(finding: Finding) -> int:
    return _TELLING.index(finding.rule) if finding.rule in _TELLING else len(_TELLING)
