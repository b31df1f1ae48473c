"""What a check of this directory answers."""

from __future__ import annotations

from typing import Any, NamedTuple


class Answer(NamedTuple):
    """It passed."""

    why: str
    figures: dict[str, Any]


class CannotRun(Exception):
    """This machine lacks what the check needs; the message says what."""
