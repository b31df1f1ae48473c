"""What the judges of kernel lines share: how old a line is, and what it is worth. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.agent.checks.check import History
from everstep.agent.checks.kernel.lines import KernelLog, Line
from everstep.diagnosis.words import Verdict
from everstep.model import Seconds

QUOTED = 160
"""Characters of a line in a reason."""
WEAKER = {Verdict.EVICT: Verdict.SUSPECT, Verdict.SUSPECT: Verdict.WARN, Verdict.USER: Verdict.WARN}
"""What a line is worth that was written before this machine came to the job."""


def is_older_than_us(line: Line, history: History[KernelLog]) -> bool:
    """Whether it was in the log when this machine came to the job: numbers, unlike times, are sure.

    The machine may have been repaired since: Azure/azurehpc-health-checks, PR 648, kept a node out
    because of an old line.
    """
    return line.seq <= history.first.sample.seq


def age(line: Line, log: KernelLog) -> Seconds:
    return max(0.0, log.clock - line.at)


def quoted(line: Line) -> str:
    text = line.text if len(line.text) <= QUOTED else f"{line.text[:QUOTED]}..."
    return f"'{text}'"


def when(line: Line, history: History[KernelLog]) -> str:
    """When it was written, for people; says so if that was before our time."""
    said = f"{line.at:.1f} s after boot"
    return f"seen before this job, at {said}" if is_older_than_us(line, history) else said


def of_boot(log: KernelLog) -> str:
    """The cause that all machines share which are one host."""
    return f"boot {log.boot_id}"


def times(lines: Iterable[Line]) -> int:
    """How often it happened: some lines say it of several times at once."""
    return sum(int(line.names.get("times", "1")) for line in lines)
