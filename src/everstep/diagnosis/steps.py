"""Whether and how far a log shows training, whatever its trainer prints.

Used to tell whether training went on after a line that looks like a failure. progress.py reads
values; this only knows that a line reports a step, of any trainer, and which.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from everstep.model import Value

_STEP = re.compile(
    r"(?:^|[\s\[{(,;|'\"])"
    r"(?:(?:global|train|training|optimizer)[_ ]?step|step|iteration|iter|it|batch|update|b|nb"
    r"|sheet|round|episode)['\"]?\s*[:=/#]?\s*(\d{1,9})(?![\d.]*(?:%|ms\b|s/|/s))",
    re.IGNORECASE,
)
_BAR = re.compile(r"\|\s*(\d{1,9})/\d{1,9} \[")
_LOSS = re.compile(
    r"(?:^|[\s{(|,'\"])(?:train_|lm |train/)?loss['\"]?\s*[:= ]\s*-?(\d+)\.\d", re.IGNORECASE
)
_EPOCH = re.compile(r"(?:^|\W)epoch[ :=]+(\d{1,6})\b", re.IGNORECASE)
_NO_PROGRESS = re.compile(
    r"Error|Exception|Traceback|\bFile \"|NCCL|SocketImpl|exitcode|signal|WARN|Work(?:NCCL|Gloo)"
    r"|resum|restor|load(?:ed|ing)|sav(?:ed|ing)|snapshot|checkpoint",
)
_DIGITS = re.compile(r"\d+")
TEMPLATE_TIMES = 2
"""A line that reports steps is one of several of its form."""


class Progress(Value, frozen=True, kw_only=True):
    """Lines of a text that report steps."""

    lines: tuple[int, ...]
    """Their numbers within the given lines, from 0."""
    last_step: int | None


def progress_in(lines: Sequence[str]) -> Progress:
    """The lines that report steps, and the last step."""
    found: list[tuple[int, int, str]] = []
    for number, line in enumerate(lines):
        step = step_of(line)
        if step is not None:
            found.append((number, step[0], step[1]))
    forms = Counter(form for _, _, form in found)
    usual = [(number, step) for number, step, form in found if forms[form] >= TEMPLATE_TIMES]
    return Progress(
        lines=tuple(number for number, _ in usual), last_step=usual[-1][1] if usual else None
    )


def step_of(line: str) -> tuple[int, str] | None:
    """The step that a line reports, and the form of what stands before it."""
    if _NO_PROGRESS.search(line):
        return None
    found = _STEP.search(line) or _BAR.search(line) or _EPOCH.search(line) or _LOSS.search(line)
    if found is None:
        return None
    before = _DIGITS.sub("#", line[: found.start(1)])
    return int(found[1]), " ".join(before.split())[-40:]
