r"""What the kernel writes into /dev/kmsg, record by record, taken apart. Pure.

The form of a record is that of Documentation/ABI/testing/dev-kmsg of Linux:
"PRIORITY,SEQUENCE,MICROSECONDS,FLAGS;TEXT", then lines " KEY=value"; bytes that are not printable
come as \xHH. kmsg.py reads with it, for the agent and for the node service.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from everstep.model import Seconds

_HEAD = re.compile(rb"(\d{1,6}),(\d{1,20}),(\d{1,20}),[^;]{0,200};")
_ESCAPED = re.compile(rb"\\x([0-9a-fA-F]{2})")
ASCII_END = 128
_UNSEEMLY = dict.fromkeys((*range(32), 127, *range(128, 160)), " ")


class Record(NamedTuple):
    """One record. The text stays as it came: most records are looked at no further."""

    level: int
    """0 emergency ... 7 debug."""
    seq: int
    at: Seconds
    """Since boot, on the kernel log's own clock."""
    body: bytes
    tail: bytes
    """Lines " KEY=value"."""


def parse(raw: bytes) -> Record | None:
    """None: this is no record."""
    head = _HEAD.match(raw)
    if head is None:
        return None
    body, _, tail = raw[head.end() :].partition(b"\n")
    return Record(int(head[1]) & 7, int(head[2]), int(head[3]) / 1e6, body, tail)


def unescaped(body: bytes) -> bytes:
    """Without control characters, which would end a line where it does not end."""
    if b"\\" not in body:
        return body
    return _ESCAPED.sub(_byte, body)


def _byte(found: re.Match[bytes]) -> bytes:
    value = int(found[1], 16)
    return b" " if value in _UNSEEMLY and value < ASCII_END else bytes([value])


def text_of(body: bytes) -> str:
    """The text for people and patterns: one line without control characters."""
    return unescaped(body).decode("utf-8", "replace").translate(_UNSEEMLY)


def device_of(tail: bytes) -> Mapping[str, str]:
    """The device that the record's tail names, as names of a rule's groups: pci or interface."""
    for line in text_of(tail.replace(b"\n", b" ")).split(" "):
        if line.startswith("DEVICE=+pci:"):
            return {"pci": line.removeprefix("DEVICE=+pci:")}
    return {}
