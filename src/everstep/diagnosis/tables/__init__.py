"""The rules that come with everstep, one file per family; read once by whoever diagnoses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources

from everstep.diagnosis.rules import Rules, grades_from, parse, together
from everstep.diagnosis.words import Grade

_GRADES = "grades.toml"


@cache
def own_rules() -> Rules:
    """All of them."""
    files = sorted(resources.files(__name__).iterdir(), key=lambda file: file.name)
    return together(
        [
            parse(file.read_text("utf-8"), file.name)
            for file in files
            if file.name.endswith(".toml") and file.name != _GRADES
        ]
    )


@cache
def own_grades() -> Mapping[Grade, int]:
    """How much the grades count."""
    return grades_from(resources.files(__name__).joinpath(_GRADES).read_text("utf-8"))
