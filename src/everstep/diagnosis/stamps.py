"""The time that a line says it was printed at.

Used by logs.py to order roots of different ranks and machines; never to compare with our clock.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

from everstep.model import Seconds

_MONTHS = {
    name: number
    for number, name in enumerate(
        ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"), 1
    )
}
_CLOCK = r"(?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)(?:[.,](?P<f>\d+))?"
_FORMS = (
    # 2026-02-11 02:41:18,727 and ISO 8601, also within torchrun's tables (2025-07-02_17:25:50)
    re.compile(rf"(?P<Y>20\d\d)[-/](?P<M>\d\d)[-/](?P<D>\d\d)[ T_,]+{_CLOCK}"),
    # glog of c10d: E1019 21:08:44.561203887, with one or two digits of month
    re.compile(rf"\b[IWEF](?P<M>1[0-2]|0?[1-9])(?P<D>[0-3]\d) {_CLOCK}"),
    # dmesg -T: Sat Oct 11 02:17:45 2025
    re.compile(rf"\b(?P<B>[A-Z][a-z]{{2}}) +(?P<D>\d{{1,2}}) {_CLOCK}(?: (?P<Y>20\d\d))?"),
    # a bare clock
    re.compile(rf"(?<![\d:]){_CLOCK}(?![\d:])"),
)
_LOOK_AT = 160
"""Time stamps stand at the beginning of lines, after labels."""


def stamp_of(line: str) -> Seconds | None:
    """Seconds since the epoch in the line's own time zone, or of an unnamed day or year.

    Stamps of one form are comparable with each other, which is all that callers may do with them.
    """
    head = line[:_LOOK_AT]
    for form in _FORMS:
        found = form.search(head)
        if found is not None:
            return _seconds(found.groupdict())
    return None


def _seconds(parts: dict[str, str | None]) -> Seconds | None:
    month = _MONTHS.get(parts.get("B") or "") or int(parts.get("M") or 1)
    year, day = int(parts.get("Y") or 1972), int(parts.get("D") or 1)
    try:
        moment = datetime(
            year,
            month,
            day,
            int(parts["h"] or 0),
            int(parts["m"] or 0),
            int(parts["s"] or 0),
            tzinfo=UTC,
        )
    except ValueError:
        return None
    return moment.timestamp() + float(f"0.{parts['f']}" if parts.get("f") else 0)
