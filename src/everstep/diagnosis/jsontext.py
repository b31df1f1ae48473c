"""JSON as tools write it: one value, several in a row, or one on each line.

Used by stacks.py, flight.py and ras.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

MALFORMED = (TypeError, ValueError, AttributeError, KeyError, OverflowError, RecursionError)
"""What values of other types than a tool writes raise where they are read: then it is no dump."""
_BETWEEN = " \t\r\n,"


def documents(text: str) -> Iterator[Any]:
    """The values that a text begins with, until something else comes; none if it begins so."""
    decoder = json.JSONDecoder()
    at = _skip(text, 0)
    while at < len(text) and text[at] in "[{":
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return
        yield value
        at = _skip(text, at)


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _BETWEEN:
        at += 1
    return at
