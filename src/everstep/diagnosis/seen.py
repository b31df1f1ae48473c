"""What one log tells: logs.py makes it, judge.py weighs it with that of all others."""

from __future__ import annotations

from everstep.diagnosis.findings import Exit, Finding, Place, Speaker
from everstep.diagnosis.rules import Means
from everstep.model import Seconds, Value


class Marked(Value, frozen=True, kw_only=True):
    """A mark that was found."""

    mark: str
    means: Means
    place: Place
    speaker: Speaker
    at: Seconds | None
    attempt: int


class Seen(Value, frozen=True, kw_only=True):
    """Everything one log tells."""

    file: str
    findings: tuple[Finding, ...]
    marks: tuple[Marked, ...]
    exits: tuple[Exit, ...]
    progress: tuple[int, ...]
    """Numbers of the lines at its end that report steps."""
