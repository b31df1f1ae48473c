"""What `everstep diagnose` and the controller get: one answer with its reasons."""

from __future__ import annotations

from everstep.diagnosis.findings import Finding
from everstep.diagnosis.words import Category, FirstAction, RootClass
from everstep.model import Rank, Value


class Answer(Value, frozen=True, kw_only=True):
    """The judgement. Field names are the keys of `everstep diagnose --json`."""

    category: Category
    root_class: RootClass
    first_action: FirstAction
    accused_ranks: tuple[Rank, ...] = ()
    accused_machines: tuple[str, ...] = ()
    confidence: float = 0.0
    """0 to 1: 0.9 a device said it itself, 0.5 two causes remain, 0.2 only consequences seen."""
    evidence: tuple[Finding, ...] = ()
    """What led to it, the most important first."""
    why: str = ""
    would_change: tuple[str, ...] = ()
    """Facts and tests that would change the verdict."""
    unread: tuple[str, ...] = ()
    """Inputs that could not be read, with the reason."""
