"""What the judges of kernel lines share: how old a line is, and what it is worth. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.agent.checks.check import History
from everstep.agent.checks.kernel.lines import KernelLog, Line
from everstep.diagnosis.words import Verdict
from everstep.model import Seconds

UNSEEN_MAX_S: Seconds = 3600.0
"""Between two looks, what was written in the last hour is news. Slurm's health programs run every
few minutes; who looks once a day must not be told of what was repaired in the morning."""
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


def fresh(fresh_s: Seconds, history: History[KernelLog]) -> Seconds:
    """How old a line may be: what was written since the look before has not been judged yet."""
    if not history.past:
        return fresh_s
    return max(fresh_s, min(UNSEEN_MAX_S, history.now.at - history.past[-1].at))


def age(line: Line, log: KernelLog) -> Seconds:
    return max(0.0, log.clock - line.at)


def quoted(line: Line) -> str:
    text = line.text if len(line.text) <= QUOTED else f"{line.text[:QUOTED]}..."
    return f"'{text}'"


def when(line: Line, history: History[KernelLog]) -> str:
    """When it was written, for people; says so if that was before our time."""
    said = f"{line.at:.1f} s after boot"
    return f"written before the first look, at {said}" if is_older_than_us(line, history) else said


def of_boot(log: KernelLog) -> str:
    """The cause that all machines share which are one host."""
    return f"boot {log.boot_id}"


def of_device(log: KernelLog, thing: str) -> str:
    """The cause that machines of this host share which use the same device; empty: the host's."""
    return f"{of_boot(log)} {thing}".strip()


def times(lines: Iterable[Line]) -> int:
    """How often it happened: some lines say it of several times at once."""
    return sum(int(line.names.get("times", "1")) for line in lines)
