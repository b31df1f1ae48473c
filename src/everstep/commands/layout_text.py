"""The text of --layout: "tp=8,pp=4,dp=2", perhaps with "order=tp-cp-dp-pp".

Used by plan.py and stacks.py, which know of which ranks it has to be the layout.
"""

from __future__ import annotations

import msgspec

from everstep.model import LayoutSpec, UserError


def layout_spec(text: str) -> LayoutSpec:
    """What it says. Raises UserError."""
    fields: dict[str, int | tuple[str, ...]] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name == "order":
            fields[name] = tuple(value.split("-"))
        elif name in ("tp", "cp", "dp", "pp", "ep") and value.isdecimal():
            fields[name] = int(value)
        else:
            raise UserError(f"--layout {text}: {part!r} is no size; write tp=8,pp=4,dp=2.")
    return msgspec.convert(fields, LayoutSpec)
