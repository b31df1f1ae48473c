"""The fence between everstep and the training loop: what fails behind it is switched off.

Everything the library does for a script runs through Feature.attempt(), so that a defect of ours, a
full disk or an odd object costs the script that one feature and never a step. The exception is
restoring: to go on from the wrong state would be worse than to stop.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

from everstep.model import NO_STEP, EverstepError, Step
from everstep.trainer.notices import NoticeKind, Notices

T = TypeVar("T")
DEEPEST = 8
"""Calls that are shown of a defect."""


class Feature:
    """One thing that the library does, until it fails."""

    def __init__(self, name: str, kind: NoticeKind, notices: Notices) -> None:
        self._name = name
        self._kind = kind
        self._notices = notices
        self.on = True

    def attempt(self, work: Callable[[], T], otherwise: T) -> T:
        """The result of `work`, or `otherwise` if the feature is off or fails now."""
        if not self.on:
            return otherwise
        try:
            return work()
        except Exception as error:  # noqa: BLE001 -- the fence: see above
            self.switch_off(error)
            return otherwise

    def switch_off(self, error: Exception, step: Step = NO_STEP) -> None:
        """Say once why; our own errors are one sentence, others are defects and show where."""
        if not self.on:
            return
        self.on = False
        if isinstance(error, EverstepError):
            why = str(error)
        else:
            why = f"{type(error).__name__}: {error} (at {_where(error)})"
        self._notices.tell(self._kind, f"{self._name} off, training goes on: {why}", step)


def _where(error: Exception) -> str:
    """The calls that led to the error, innermost first.

    Not a usual traceback: Python 3.11 parses source to draw one, which makes the parser fail in
    whatever other thread is using it at that moment, and that may be training.
    """
    calls = traceback.extract_tb(error.__traceback__)[-DEEPEST:][::-1]
    return ", ".join(f"{call.filename}:{call.lineno} {call.name}" for call in calls)
