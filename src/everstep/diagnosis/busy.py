"""What a job was doing when it stood still, by its own last words.

Used by silence.py. A save, an evaluation, the end of an epoch, the preparing of data are things
that a program does on one rank while the others wait: a time-out then is the program's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum


class Busy(StrEnum):
    """The value is how a sentence says it."""

    SAVING = "the saving of a checkpoint"
    EVALUATING = "an evaluation"
    ENDING = "the end of an epoch or of training"
    PREPARING = "the preparing of data or of a model"
    UNKNOWN = "nothing that explains it"


_WORDS = {
    Busy.SAVING: (
        r"sav(?:e|ed|ing)|checkpoint\w*|ckpt|snapshot\w*|persist\w*|consolidat\w+|upload\w*"
        r"|export(?:ing|ed)?|gathering (?:full |the )?(?:weights|parameters|state)"
    ),
    Busy.EVALUATING: (r"evaluat\w+|validat\w+|eval|benchmark\w*|generating samples|perplexity"),
    Busy.ENDING: (
        r"(?:epoch|ep) \d+ (?:closed|done|finished|ended|complete\w*|over)|end of epoch"
        r"|training (?:finished|complete\w*|done)|final step|last batch|exhausted"
    ),
    Busy.PREPARING: (
        r"tokeniz\w+|pack(?:ed|ing)|preprocess\w*|building|cach(?:e|ing)|index(?:ing)?|download\w*"
        r"|shuffl\w+|loading|preparing|compil\w+|autotun\w+|warm(?:ing)? ?up"
    ),
}
_PATTERNS = {busy: re.compile(rf"\b(?:{words})\b", re.IGNORECASE) for busy, words in _WORDS.items()}
_FAILED = re.compile(r"timed? ?out|Watchdog|Error|Exception|Traceback|NCCL|\bwarn", re.IGNORECASE)
_WENT_ON = re.compile(
    r"\b(?:step|iter\w*|it|batch|b)\b.{0,3}\d+.*\b(?:\w*loss|nll|ce|tokens?|samples?|lr|img)\b",
    re.IGNORECASE,
)


def busy_of(lines: Iterable[str]) -> Busy | None:
    """What the last of the lines speak of; None if of nothing of the kind, or of steps since."""
    found = None
    for line in lines:
        if _FAILED.search(line):
            continue
        spoken = next((b for b, pattern in _PATTERNS.items() if pattern.search(line)), None)
        if spoken is not None:
            found = spoken
        elif _WENT_ON.search(line):
            found = None
    return found
