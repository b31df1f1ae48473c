"""Reads the training progress that scripts print: lines become samples.

Used by series.py for logs of failed jobs and by agent/output.py for scripts that run and do not
call run.report. One Reader per text: some trainers spread a report over a progress bar and a line,
or over a block of lines. A line that is no report of training progress gives nothing: an
evaluation, a value inside a path, a configuration.

`PREFILTER` is for an engine that looks for many patterns at once: a line that matches none of them
need not be given to a Reader.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import NamedTuple

from msgspec.structs import replace

from everstep.diagnosis.metric_names import NUMBERS, TOLD, Meaning, meaning_of
from everstep.diagnosis.sample import Sample, sample_of
from everstep.model import Seconds

PREFILTER: tuple[str, ...] = (
    r"(?i)(step|iter|iteration|batch|num_updates|update|\bit)[\"']?\s?[:=\s/]\s*[\"']?\d",
    r"[\"'](train[_/])?loss[\"']\s*:",
    r"(?i)epoch[:\s\[]+\d+\]?[:\s\[]+\d+\s*/\s*\d+",
    r"(?i)overflow",
    r"oss scale already at minimum|Minimum loss scale reached",
    r"\d+%\|.{0,200}loss",
    r"\|\s*[\d.]+k?/\d+\s*\[",
    r"\[(batch|step)=\d+",
    r"^\s*(\d+:\s*)?(Train |train/|optim/|throughput/)",
    r"rank\s+\d+: \d",
    r"(times|time) across ranks",
    r"M[nx]Rtt/Rnk",
    r"Rank=\d+ Node=|orst performing",
    r"^\s{1,6}[\w.-]+:\s*$",
)
"""No look-around and no back-reference, for engines that have neither."""

LINE_MAX = 16_384
"""Of a longer line only the beginning is read."""
NAN = float("nan")
_VALUE = (
    r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
    r"|[-+]?(?:nan|inf(?:inity)?)"
)
_UNIT = r"ms|us|secs|sec|seconds|s|%|[GMT]i?B|[kKMB]"
_PAIR = re.compile(
    rf"""
    (?<![A-Za-z_.\\-]) (?<![^0-9\s({{\[,|"']/) (?<![A-Za-z_]\d)
    (?P<key> (?!(?:nan|inf)\b) [A-Za-z_][\w/@%.-]* (?:\([\w/%]+\))?
        (?: [ ](?!(?:nan|inf)\b)[A-Za-z(][\w/()%-]* ){{0,5}} )
    (?: ["']?\s*[:=]\s* | \s+ )
    (?: ["'\[(]\s* | tensor\(\s* | [a-z.]*float\d*\( )*
    (?P<value> {_VALUE} )
    (?: \s?(?P<unit> {_UNIT} )(?![A-Za-z]) )?
    (?! [A-Za-z_] | \.[A-Za-z] )
    """,
    re.VERBOSE | re.IGNORECASE,
)
_TRAILING = re.compile(
    r"(?:^|[|,]\s*)(?P<value>(?:\d{1,3}(?:,\d{3})+|\d{1,15})(?:\.\d{1,9})?)\s?"
    r"(?P<key>ms/step|s/step|ms/iter|ms|tok/s|tokens/s|samples/s|TFLOPS?|% (?:bf16 )?MFU)"
    r"(?![A-Za-z/])"
)
"""llm.c and others: "102.20 ms | 45.2% bf16 MFU | 123456 tok/s"."""
_TRAILING_NAMES = {
    "ms": "step_time_ms",
    "ms/step": "step_time_ms",
    "ms/iter": "step_time_ms",
    "s/step": "step_time_s",
    "% bf16 mfu": "mfu",
    "% mfu": "mfu",
}
_BAR = re.compile(
    r"(?P<name>[\w ./=-]{0,60}?):?\s*\d+%\|[^|]{0,300}\|"
    r"\s*(?P<at>\d+)/(?P<of>\d+|\?)\s*\[(?P<rest>[^\]]*)"
)
_RATE = re.compile(r"([\d.]+)\s?(s/it|it/s)")
_ITERATION = re.compile(r"\biteration\s+(\d+)/")
_OVERFLOW = re.compile(
    r"overflow.{0,80}?(?:reducing to|loss scale to:?|setting loss scale to:?"
    r"|Reducing hysteresis to|to decrease to|decreasing to)\s*(?P<to>[\d.eE+]+)"
    r"|OVERFLOW! .{0,40}Skipping step",
    re.IGNORECASE,
)
_SCALE_TRIED = re.compile(r"Attempted loss scale: ([\d.eE+]+)")
_AT_MINIMUM = re.compile(r"loss scale already at minimum|Minimum loss scale reached", re.IGNORECASE)
_BLOCK = re.compile(r"\[(?:epoch=\d+\]\[)?(?:batch|step)=(\d+)(?:/\d+)?[^\]]*\]:?\s*$")
_IN_EPOCH = re.compile(
    r"epoch:?\s*\[?(?P<epoch>\d+)(?:/\d+)?(?:\]|:|,|\s)\s*"
    r"\[?\s*(?P<at>\d+)\s*/\s*(?P<of>\d+)",
    re.IGNORECASE,
)
"""fairseq, torchvision, mmengine: a place in an epoch instead of a step."""
_TUNE = re.compile(r"(?P<epoch>\d+)\|(?P<step>\d+)\|Loss: (?P<loss>[-+\w.]+): ")
"""torchtune, before its progress bar."""
_EVALUATION = re.compile(
    r"(?i)\b(?:val|valid|validat\w*|eval|evaluat\w*|test|testing|benchmark|best)\b"
)
_SPLIT = re.compile(r"[\"'](?:val|valid|validation|eval|test|dev)[\"']", re.IGNORECASE)
_SUMMARY = re.compile(r"train_runtime|\bsummary\b|\baverage over\b", re.IGNORECASE)
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_WHEN = re.compile(r"(\d{4})[-/](\d\d)[-/](\d\d)[ T_](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
_NULL = re.compile(r"[\"'](?:train[/_])?loss[\"']\s*:\s*(?:null|None)")
_HOST = re.compile(r"(?<![\w/])(?:host|hostname|node)[\"']?\s*[:=]\s*[\"']?([A-Za-z][\w.-]*)")
_WORDS = frozenset(
    {"a", "and", "at", "average", "avg", "current", "for", "global", "in", "info", "mean", "now"}
    | {"of", "on", "rank", "running", "step", "the", "total", "train", "trainer", "training"}
    | {"with"}
)
"""May stand before a name without changing what it means: "INFO train loss"."""
_ANYWHERE = frozenset({"step", "rank", "epoch"})
"""May follow any word: "saved at step 12"."""
_STRICT = frozenset({"samples_per_s", "skipped", "nan_steps", "host_gb", "attempt", "batch"})
"""Need a colon or an equals sign before their value; "step 12 loss 3.4" needs none."""


class Pattern(NamedTuple):
    """A site's own format: a regular expression whose named groups are fields of Sample."""

    expression: re.Pattern[str]

    @classmethod
    def of(cls, text: str) -> Pattern:
        """ValueError if it is no regular expression or a group is no field that is read."""
        try:
            expression = re.compile(text)
        except re.error as error:
            raise ValueError(f"{text!r} is no regular expression: {error}") from error
        known = NUMBERS | {"gpu_gb"}
        unknown = sorted(set(expression.groupindex) - known)
        if unknown or "step" not in expression.groupindex:
            wrong = f"unknown group {unknown[0]}" if unknown else "there is no group named step"
            raise ValueError(
                f"{text!r}: {wrong}; groups are named after what they hold:"
                f" {', '.join(sorted(known))}"
            )
        return cls(expression)


class _Bar(NamedTuple):
    at: int
    of: int
    step_s: float | None


class Reader:
    """Turns the lines of one text, in their order, into samples."""

    def __init__(self, patterns: Iterable[Pattern] = ()) -> None:
        self._patterns = tuple(patterns)
        self._bar: _Bar | None = None
        self._block: dict[str, float] | None = None
        self._block_at = 0
        self._step = -1
        self._counters: dict[str, float] = {}

    def read(self, text: str, line: int = 0) -> list[Sample]:
        """The samples that this line completes, mostly none; `line` is its number."""
        if "\x1b" in text:
            text = _ESCAPE.sub("", text)
        found: list[Sample] = []
        for piece in text.split("\r"):
            if piece.strip():
                found += self._piece(piece[:LINE_MAX], line)
        return found

    def end(self) -> list[Sample]:
        """What was waiting for another line."""
        return self._close_block()

    # --- formats ---------------------------------------------------------------------------------

    def _piece(self, text: str, line: int) -> list[Sample]:
        for pattern in self._patterns:
            match = pattern.expression.search(text)
            if match is not None:
                values = {k: number(v) for k, v in match.groupdict().items() if v is not None}
                return self._made(values, text, line, "site")
        if "| consumed samples:" in text:
            return self._close_block() + self._made(_megatron(text), text, line, "megatron")
        tune = _TUNE.search(text) if "Loss: " in text else None
        if tune is not None:
            return self._made({k: number(v) for k, v in tune.groupdict().items()}, "", line, "tune")
        done: list[Sample] = []
        header = _BLOCK.search(text) if "[" in text else None
        if header is not None:
            done = self._close_block()
            self._block = {"step": float(header[1])}
            self._block_at = line
            return done
        if self._block is not None:
            pairs = _pairs(text)
            member = "step" not in pairs
            if member and (pairs or re.match(r"\s+\S.*[:=]", text)):
                self._block = pairs | self._block
                return []
            done = self._close_block()
        if "verflow" in text or "VERFLOW" in text or "inimum" in text:
            done += self._overflow(text, line)
        return done + self._bars_and_pairs(text, line)

    def _close_block(self) -> list[Sample]:
        values, self._block = self._block, None
        if values is None:
            return []
        return self._made(values, "", self._block_at, "block")

    def _overflow(self, text: str, line: int) -> list[Sample]:
        minimum = _AT_MINIMUM.search(text) is not None
        match = _OVERFLOW.search(text)
        if match is None and not minimum:
            return []
        tried = _SCALE_TRIED.search(text)
        to = match["to"] if match is not None and "hysteresis" not in match[0] else None
        scale = to or (tried[1] if tried else None)
        at = [int(bar["at"]) for bar in _BAR.finditer(text)]
        step = at[-1] if at else max(self._step, self._bar.at if self._bar else -1)
        return [
            Sample(
                step=step,
                loss_scale=number(scale.rstrip(".")) if scale else None,
                skipped=0 if match is None else 1,
                at_minimum=minimum,
                form="overflow",
                at=when(text),
                line=line,
            )
        ]

    def _bars_and_pairs(self, text: str, line: int) -> list[Sample]:
        bars = list(_BAR.finditer(text)) if "%|" in text else []
        found: list[Sample] = []
        for bar in bars:
            found += self._progress_bar(bar, line)
        rest = _BAR.sub(" ", text) if bars else text
        if not rest.strip() or _not_training(rest):
            return found
        values = _pairs(rest)
        if "step" not in values and "loss" in values and ("epoch" in values or "lr" in values):
            place = _IN_EPOCH.search(rest)
            if place is not None:
                values["step"] = float(int(place["epoch"]) * int(place["of"]) + int(place["at"]))
                return found + self._made(values, rest, line, "epoch")
            values["step"] = float(self._bar.at if self._bar is not None else self._step + 1)
            if self._bar is not None and self._bar.step_s is not None:
                values.setdefault("step_s", self._bar.step_s)
            return found + self._made(values, rest, line, "dict")
        return found + self._made(values, rest, line, "pairs")

    def _progress_bar(self, bar: re.Match[str], line: int) -> list[Sample]:
        name = bar["name"].strip().lower()
        if name and not re.search(r"(?:^|\s)(?:epoch|train|training|step|steps|progress)\b", name):
            return []
        if re.search(r"\b(?:val|valid\w*|eval\w*|test\w*|sanity)\b", name):
            return []
        at, of = int(bar["at"]), 0 if bar["of"] == "?" else int(bar["of"])
        rate = _RATE.search(bar["rest"])
        step_s = None
        if rate is not None and float(rate[1]) > 0:
            step_s = float(rate[1]) if rate[2] == "s/it" else 1 / float(rate[1])
        values = _pairs(bar["rest"])
        if self._bar is None or of >= self._bar.of or at > self._bar.at:
            self._bar = _Bar(at, of, step_s)
        if values.keys().isdisjoint({"loss", "grad_norm"}):
            return []
        epoch = re.search(r"epoch\D{0,3}(\d+)", name)
        if epoch is not None:
            values.setdefault("epoch", float(epoch[1]))
        values.setdefault("step", values.get("epoch", 0.0) * of + at)
        if step_s is not None:
            values.setdefault("step_s", step_s)
        return self._made(values, "", line, "bar")

    # --- from values to a sample -----------------------------------------------------------------

    def _made(self, values: dict[str, float], text: str, line: int, form: str) -> list[Sample]:
        step = values.get("step", NAN)
        if not 0 <= step < 1e12 or values.keys().isdisjoint(TOLD):
            return []
        if form == "pairs":
            form = _form_of(values, text)
        self._step = int(step)
        sample = sample_of(values, form=form, line=line)
        skipped = self._skipped(values.get("skipped"), text)
        return [replace(sample, skipped=skipped, at=when(text), host=_host(text))]

    def _skipped(self, counter: float | None, text: str) -> int:
        """Of a running total the difference; Megatron counts anew in every report."""
        if counter is None or not counter >= 0:
            return 0
        if "number of skipped iterations" in text:
            return int(counter)
        before = self._counters.get("skipped", counter if counter > self._step + 1 else 0.0)
        self._counters["skipped"] = counter
        return int(counter - before if counter >= before else counter)


def _form_of(values: dict[str, float], text: str) -> str:
    """Which of the formats that are read alike it is: one that never says a loss misses none."""
    if "loss" not in values and "skipped=" in text:
        return "deepspeed"
    only_speed = values.keys().isdisjoint(set(TOLD) - {"step_s", "samples_per_s"})
    return "speed" if only_speed and not _NULL.search(text) else "pairs"


def _host(text: str) -> str | None:
    match = _HOST.search(text) if "ost" in text or "ode" in text else None
    return None if match is None else match[1]


def _not_training(text: str) -> bool:
    """Whether the line speaks of an evaluation, or of the run as a whole."""
    if _SUMMARY.search(text) or _SPLIT.search(text):
        return True
    word = _EVALUATION.search(text)
    if word is None:
        return False
    first = re.search(r"(?i)(?<!\w)(?:loss|lm loss|train_loss|grad[_ ]norm|actor/)", text)
    return first is None or word.start() < first.start() or "train loss" in text


def _megatron(text: str) -> dict[str, float]:
    """The same as _pairs() of a line of Megatron-LM, ten times as fast: such logs are long."""
    place = _ITERATION.search(text)
    if place is None:
        return _pairs(text)
    values = {"step": float(place[1])}
    for part in text.split("|")[1:]:
        name, colon, value = part.rpartition(":")
        meaning = meaning_of(name.strip()) if colon else None
        if meaning is not None and meaning.field not in values:
            values[meaning.field] = number(value.strip()) * meaning.factor
    return values


def _pairs(text: str) -> dict[str, float]:
    """Every number of the line whose name is known, by field."""
    found: dict[str, tuple[int, float]] = {}
    for match in _PAIR.finditer(text):
        meaning = _meaning(match, text)
        if meaning is None:
            continue
        value = _value(match["value"], match["unit"], meaning)
        if value is None:
            continue
        field = "step_s" if meaning.field == "time" else meaning.field
        if field not in found or meaning.rank < found[field][0]:
            found[field] = (meaning.rank, value)
    for match in _TRAILING.finditer(text):
        unit = match["key"].lower()
        meaning = meaning_of(_TRAILING_NAMES.get(unit, unit))
        if meaning is not None and meaning.field not in found and found:
            value = number(match["value"]) * meaning.factor
            found[meaning.field] = (9, value / 100 if meaning.field == "mfu" else value)
    return {field: value for field, (_, value) in found.items()}


def _meaning(match: re.Match[str], text: str) -> Meaning | None:
    """What the name before a number means: all of it, or its last words if the others are plain."""
    key = match["key"]
    meaning = meaning_of(key) or _memory(key, match["unit"])
    words = key.split(" ")
    while meaning is None and len(words) > 1:
        first = words.pop(0)
        if first.lower().strip("/") not in _WORDS and not first.isupper():
            rest = meaning_of(" ".join(words[-1:]))
            return rest if rest is not None and rest.field in _ANYWHERE else None
        meaning = meaning_of(" ".join(words)) or _memory(" ".join(words), match["unit"])
    if meaning is None:
        return None
    between = text[match.end("key") : match.start("value")]
    if not between.strip(" \"'[(") and meaning.field in _STRICT:
        return None
    if meaning.field == "time" and match["unit"] not in ("ms", "s"):
        return None
    return meaning


def _memory(key: str, unit: str | None) -> Meaning | None:
    """Memory of the GPU, where a unit says that it is memory."""
    name = key.lower().rsplit("/", 1)[-1]
    if unit is None or not unit.endswith("B"):
        known = name in ("max_memory_allocated_gb", "peak_mem_gb", "gpu_mem_gb", "mem_gb")
        return Meaning("gpu_gb") if known else None
    return Meaning("gpu_gb") if re.search(r"mem", name) and "host" not in name else None


def _value(text: str, unit: str | None, meaning: Meaning) -> float | None:
    value = number(text)
    if meaning.field in ("loss", "grad_norm", "lr", "loss_scale") and unit in ("ms", "s", "%"):
        return None
    factor = meaning.factor
    thousandth = meaning.field in ("step_s", "time") and unit == "ms"
    if thousandth or (meaning.field in ("gpu_gb", "host_gb") and unit in ("MB", "MiB")):
        factor = 1e-3
    elif unit in ("k", "K") and meaning.field.endswith("_per_s"):
        factor = 1e3
    elif unit == "M" and meaning.field.endswith("_per_s"):
        factor = 1e6
    if meaning.field == "mfu" and (unit == "%" or value > 1.5):
        factor = 0.01
    return value * factor


def number(text: str) -> float:
    """The number a trainer printed: NaN if it is none."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return NAN


def when(text: str) -> Seconds | None:
    match = _WHEN.search(text)
    if match is None:
        return None
    year, month, day, hour, minute, second = (int(part) for part in match.groups()[:6])
    try:
        moment = datetime(year, month, day, hour, minute, min(second, 59), tzinfo=UTC)
    except ValueError:
        return None
    return moment.timestamp() + float(f"0.{match[7] or 0}")
