"""Bytes as programs print them, made readable: colours, progress bars, broken UTF-8.

Used by whatever reads a line or a whole small file.
"""

from __future__ import annotations

import re

READABLE_CHARS = 400
"""Lines shown to people are cut to this."""

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")
_BARE_COLOURS = re.compile(r"\[(?:0|1|3[0-7]|9[0-7])(?:;\d+)?m")
"""What is left of a colour code when somebody removed the escape character alone."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def clean(raw: bytes) -> str:
    """One line as text, without colours and control characters."""
    text = raw.decode("utf-8", errors="replace")
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    if "m" in text and "[" in text:
        text = _BARE_COLOURS.sub("", text)
    return _CONTROLS.sub("", text).rstrip()


def readable(text: str) -> str:
    """A line cut so that a terminal can show it."""
    text = " ".join(text.split())
    return text if len(text) <= READABLE_CHARS else f"{text[:READABLE_CHARS]} ..."
