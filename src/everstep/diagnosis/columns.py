"""Reads metric tables: CSV, TSV and tables aligned with blanks, one row at a time.

Used by series.py for files that open with a header. Columns are known by the names of
metric_names.py; others are kept as numbers, for a comparison of ranks and hosts (peers.py).
"""

from __future__ import annotations

import csv
import re

from msgspec.structs import replace

from everstep.diagnosis.metric_names import SPEED, TOLD, Meaning, meaning_of
from everstep.diagnosis.progress import number, when
from everstep.diagnosis.sample import Sample, sample_of
from everstep.model import Rank, Seconds, Value

ABSENT = frozenset({"", "na", "n/a", "null", "none", "-", "--", "."})
"""Cells that say nothing. "nan" says something."""
COLUMNS_MAX = 4096
LINE_MAX = 100_000
"""A longer line is no row of a table."""
_NAME = re.compile(r"[A-Za-z_#][\w ./%()@:\[\]-]*$")
_PHASE = re.compile(r"(?i)^(?:fwd|bwd|fwd_bwd|forward|backward|compute)[ _](?:time|ms|s|sec)")
_EVALUATION = re.compile(r"(?i)(?:^|[/_. -])(?:val|valid|validation|eval|test)(?:$|[/_. -])")


class Row(Value, frozen=True, kw_only=True):
    """One line of a table."""

    line: int
    numbers: dict[str, float]
    """By the column's own name, as it stands there."""
    sample: Sample | None
    """What it says about training; None if nothing, or if it is an evaluation."""
    step: int | None = None
    rank: Rank | None = None
    host: str | None = None
    attempt: int | None = None


class Table:
    """A header and what its columns mean."""

    def __init__(self, names: list[str], delimiter: str | None) -> None:
        self.names = names
        self._delimiter = delimiter
        self._meanings = [meaning_of(name) for name in names]
        self._percent = [bool(re.search(r"%|pct|percent", name.lower())) for name in names]
        self._rows = 0
        self._skipped_before: float | None = None
        self._skips_fell = False

    @classmethod
    def of(cls, header: str, file: str = "") -> Table | None:
        """The table that this line is the header of; None if it is none that is understood.

        TensorBoard's export has one column "Value", of what the name of the file says.
        """
        text = header.strip().lstrip("\ufeff#").strip()
        if len(text) > LINE_MAX or not text.replace("\t", " ").isprintable():
            return None
        for delimiter in ("\t", ",", ";", "|", None):
            names = _cells(text, delimiter)
            if len(names) < 2 or len(names) > COLUMNS_MAX:
                continue
            if not all(_NAME.match(name) for name in names):
                continue
            if "value" in {name.lower() for name in names}:
                names = [_called(file) if name.lower() == "value" else name for name in names]
            table = cls(names, delimiter)
            if table.understood:
                return table
        return None

    @property
    def understood(self) -> bool:
        """Whether it is a series of training, or a comparison of ranks or hosts."""
        fields = {meaning.field for meaning in self._meanings if meaning is not None}
        told = bool(fields & set(TOLD)) or any(_PHASE.search(name) for name in self.names)
        return bool("step" in fields and told) or bool(fields & {"rank", "host"}) or self.wide

    @property
    def wide(self) -> bool:
        """Whether each rank or host has a column of its own."""
        return len(self.units) >= 3 and len(self.units) >= len(self.names) - 4

    @property
    def units(self) -> list[str]:
        """Columns that are named after a rank or a host."""
        found = [name for name in self.names if re.search(r"(?:rank|node|host|gpu)[-_ ]?\d+", name)]
        return [name for name in found if meaning_of(name) is None]

    def row(self, text: str, line: int) -> Row | None:
        """One line below the header; None if it has not as many cells."""
        if len(text) > LINE_MAX:
            return None
        cells = _cells(text.strip(), self._delimiter)
        if len(cells) != len(self.names):
            return None
        self._rows += 1
        numbers: dict[str, float] = {}
        known: dict[str, tuple[Meaning, float]] = {}
        host, at = None, None
        for name, meaning, cell, percent in zip(
            self.names, self._meanings, cells, self._percent, strict=True
        ):
            if cell.lower() in ABSENT:
                continue
            if meaning is not None and meaning.field == "host":
                host = cell
                continue
            if meaning is not None and meaning.field == "at":
                at = when(cell) or _epoch(cell)
                continue
            value = _numeric(cell)
            if value is None:
                continue
            numbers[name] = value
            if meaning is not None:
                _keep(known, meaning, _scaled(value, meaning, percent=percent))
        values = {field: value for field, (_, value) in known.items()}
        return Row(
            line=line,
            numbers=numbers,
            sample=self._sample(values, numbers, line, host, at),
            step=int(values["step"]) if values.get("step", -1) >= 0 else None,
            rank=Rank(int(values["rank"])) if values.get("rank", -1) >= 0 else None,
            host=host,
            attempt=int(values["attempt"]) if values.get("attempt", -1) >= 0 else None,
        )

    def _sample(
        self,
        values: dict[str, float],
        numbers: dict[str, float],
        line: int,
        host: str | None,
        at: Seconds | None,
    ) -> Sample | None:
        said = values.keys() & {"loss", "grad_norm", "step_s", *SPEED}
        evaluated = any(_EVALUATION.search(name) for name in numbers)
        if not said and (evaluated or "skipped" not in values):
            return None
        if evaluated and not said & {"loss", "grad_norm"}:
            return None
        step = values.get("step", float(self._rows - 1))
        if not step >= 0:
            return None
        sample = sample_of({**values, "step": step}, form="table", line=line)
        return replace(sample, skipped=self._skipped(values.get("skipped")), host=host, at=at)

    def _skipped(self, counter: float | None) -> int:
        """A column that only grows is a running total; one that fell counts anew in each row."""
        if counter is None or not counter >= 0:
            return 0
        before = self._skipped_before
        self._skipped_before = counter
        if before is None:
            return 0
        self._skips_fell = self._skips_fell or counter < before
        return int(counter if self._skips_fell else counter - before)


def _cells(text: str, delimiter: str | None) -> list[str]:
    if delimiter is None:
        return text.split()
    if '"' in text and delimiter in ",;":
        line = " ".join(text.splitlines())
        return [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter), [])]
    cells = [cell.strip() for cell in text.split(delimiter)]
    if delimiter == "|" and cells and not cells[0] and not cells[-1]:
        cells = cells[1:-1]
    return cells


def _called(file: str) -> str:
    """What a file's name says that its values are."""
    words = (
        ("grad", "grad_norm"),
        ("loss", "loss"),
        ("mfu", "mfu"),
        ("tflop", "tflops"),
        ("tokens", "tokens_per_s"),
        ("throughput", "tokens_per_s"),
        ("time", "step_time"),
    )
    name = file.rsplit("/", 1)[-1].lower()
    evaluated = _EVALUATION.search(name)
    return next((to for word, to in words if word in name and not evaluated), "value")


def _numeric(cell: str) -> float | None:
    match = re.fullmatch(
        r"([-+]?(?:[\d.,]+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?))\s?\D{0,8}", cell, re.IGNORECASE
    )
    return None if match is None else number(match[1])


def _epoch(cell: str) -> Seconds | None:
    """Seconds since the epoch, if that is what the cell may be; milliseconds too."""
    value = _numeric(cell)
    if value is None or not value > 1e8:
        return None
    return value / 1e3 if value > 1e11 else value


def _scaled(value: float, meaning: Meaning, *, percent: bool) -> float:
    if meaning.field == "mfu":
        return value / 100 if percent or value > 1.5 else value
    return value * meaning.factor


def _keep(known: dict[str, tuple[Meaning, float]], meaning: Meaning, value: float) -> None:
    field = "step_s" if meaning.field == "time" else meaning.field
    if meaning.field != "time" and (field not in known or meaning.rank < known[field][0].rank):
        known[field] = (meaning, value)
