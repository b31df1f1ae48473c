"""Compares ranks and hosts with each other: who is slower than all others, round after round.

Used by series.py. A time or a rate of one rank only means something beside those of the others in
the same round. Whoever waits looks slow without being it, so columns of waiting are read the other
way round; an outlier that sits at the same place of every machine is the program's doing, and one
that follows a rank to another machine is too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from everstep.diagnosis.columns import Row
from everstep.diagnosis.findings import NOBODY, Finding, Place, Site, Speaker
from everstep.diagnosis.metric_names import meaning_of
from everstep.diagnosis.progress import number
from everstep.diagnosis.words import Category, FirstAction, Grade, Role, RootClass
from everstep.model import Rank, Value

SLOW_BY = 1.12
"""Times the median of the others, in the median over the last rounds: this one is slow."""
ROUNDS_SHARE = 0.7
"""In this share of the last rounds at least."""
UNITS_MIN = 3
READINGS_MAX = 200_000
"""Older ones are forgotten."""
_RATE = re.compile(
    r"(?i)(tflop|per_s|/s|tps|throughput|gbps|gb_s|busbw|bandwidth|mfu|score|_mhz|clock|perf)"
)
_TIME = re.compile(
    r"(?i)(time|_ms|_s$|\(ms\)|\(s\)|sec|dur|latency|fwd|bwd|forward|backward|compute|step|rtt)"
)
_WAIT = re.compile(
    r"(?i)(wait|comm|all_?-?reduce|all_?gather|reduce_scatter|nccl|barrier|sync|idle|recv|bubble"
    r"|send|p2p)"
)
_STATE = re.compile(
    r"(?i)(temp|power|util|mem|rss|loss|grad|lr|seq|token_count|samples$|step$|epoch|pid)"
)
_ALL_RANKS = re.compile(r"^\s*times across ranks \((ms|s)\):")
_TIMER = re.compile(r"^\s{1,6}([\w.-]+):\s*$")
_RANK_TIME = re.compile(r"^\s+rank\s+(\d+): ([\d.]+)\s*$")
_EXTREMES = re.compile(
    r"M(?P<end>[nx])(?P<what>Rtt|E[Tt]pt)/Rnk: (?P<value>[\d.]+)\w*/(?P<rank>\d+)"
)
_STEP = re.compile(r"(?i)\b(?:step|iter|iteration)[ =:]+(\d+)")
_OWN_RANK = re.compile(r"(?i)\brank[ =:]?(\d+)")
_PHASE = re.compile(
    r"(?i)\b(?P<name>fwd|bwd|fwd_bwd|forward|backward|compute|data|optim(?:izer)?)"
    r"(?:[_ ]?time)?(?:[_ ]?ms)?[=: ]+(?P<value>[\d.]+)\s?(?:ms|s)?\b"
)
_FILE_RANK = re.compile(r"(?i)(?:^|[^a-z])(?:global_?)?rank[-_]?(\d+)")
_FILE_HOST = re.compile(r"(?i)((?:node|host|worker|gpu|dgx|hgx)[-_]?[a-z]?\d+)")
_SCORE = re.compile(r"Rank=(\d+) Node=(\S+) Score=([\d.]+)")
_PART = re.compile(r"(?i)(?:local_?rank|gpu(?:_?(?:id|index))?|device|index)")
_UNIT_COLUMN = re.compile(r"(?P<kind>rank|node|host|gpu)[-_ ]?(?P<number>\d+)", re.IGNORECASE)


_GPU = ", GPU "
_SLOW = Finding(
    rule="peers.slow",
    role=Role.ROOT,
    category=Category.MFU_DECLINE,
    root=RootClass.INFRASTRUCTURE,
    grade=Grade.SPEED,
    action=FirstAction.STOP_TIME_CHECK,
    why="",
    undecided="a finding of the machine itself (clocks, temperature, link errors) or a test",
)


class Reading(Value, frozen=True, kw_only=True):
    """One number of one rank or host in one round."""

    column: str
    value: float
    round: int
    rank: Rank | None = None
    host: str | None = None
    part: str = ""
    """Which GPU or process of the host, where the rank is not said."""
    attempt: int = 0
    line: int = 0


class PeerReader:
    """Finds such numbers in lines of a log and rows of a table."""

    def __init__(self) -> None:
        self._round = 0
        self._timer = ""
        self._in_table = False

    def line(self, text: str, line: int, speaker: Speaker = NOBODY) -> list[Reading]:
        """Megatron's timers of all ranks, its straggler detector, NVRx's scores, and the times that
        a rank prints of its own phases.
        """
        if _ALL_RANKS.match(text):
            self._round += 1
            self._in_table = True
            return []
        if self._in_table:
            timer = _TIMER.match(text)
            if timer is not None:
                self._timer = timer[1]
                return []
            timed = _RANK_TIME.match(text)
            if timed is not None:
                name = f"{self._timer}_time"
                return [self._reading(name, timed[2], line, rank=int(timed[1]))]
            self._in_table = False
        if "orst performing" in text or "elative performance" in text:
            self._round += 1
        if "/Rnk:" in text:
            return self._extremes(text, line)
        scores = [
            self._reading("score", score[3], line, rank=int(score[1]), host=score[2])
            for score in _SCORE.finditer(text)
        ]
        return scores or self._phases(text, line, speaker)

    def _phases(self, text: str, line: int, speaker: Speaker) -> list[Reading]:
        step, own = _STEP.search(text), _OWN_RANK.search(text)
        rank = Rank(int(own[1])) if own is not None else speaker.rank
        if step is None or (rank is None and speaker.machine is None):
            return []
        return [
            Reading(
                column=f"{phase['name']}_time",
                value=number(phase["value"]),
                round=int(step[1]),
                rank=rank,
                host=speaker.machine,
                line=line,
            )
            for phase in _PHASE.finditer(text)
        ]

    def row(self, row: Row, units: Sequence[str]) -> list[Reading]:
        """A table's row: one rank or host of a round, or all of them side by side."""
        step = row.step if row.step is not None else 0
        parts = [v for name, v in row.numbers.items() if _PART.fullmatch(name)]
        part = f"{parts[0]:g}" if parts else ""
        if row.rank is None and row.host is None:
            return [self._wide(name, row, step) for name in units if name in row.numbers]
        return [
            Reading(
                column=name,
                value=value,
                round=step,
                rank=row.rank,
                host=row.host,
                part=part,
                attempt=row.attempt or 0,
                line=row.line,
            )
            for name, value in row.numbers.items()
            if orientation(name)
        ]

    def _wide(self, name: str, row: Row, step: int) -> Reading:
        unit = _UNIT_COLUMN.search(name)
        assert unit is not None
        is_rank = unit["kind"].lower() in ("rank", "gpu")
        rest = (name[: unit.start()] + name[unit.end() :]).strip("_-. /") or "step_time"
        return Reading(
            column=rest if orientation(rest) else "step_time",
            value=row.numbers[name],
            round=step,
            rank=Rank(int(unit["number"])) if is_rank else None,
            host=None if is_rank else unit[0],
            attempt=row.attempt or 0,
            line=row.line,
        )

    def _extremes(self, text: str, line: int) -> list[Reading]:
        """Only the slowest and the fastest rank are named: enough if it is always the same one."""
        self._round += 1
        return [
            self._reading(
                f"extreme_{match['what'].lower()}_{match['end']}",
                match["value"],
                line,
                rank=int(match["rank"]),
            )
            for match in _EXTREMES.finditer(text)
        ]

    def _reading(
        self, column: str, value: str, line: int, *, rank: int, host: str | None = None
    ) -> Reading:
        return Reading(
            column=column,
            value=number(value),
            round=self._round,
            rank=Rank(rank),
            host=host,
            line=line,
        )


def unit_of(file: str, site: Site) -> tuple[Rank | None, str | None]:
    """Whose file it is, if its name says so."""
    name = file.rsplit("/", 1)[-1]
    rank = _FILE_RANK.search(name)
    if rank is not None:
        return Rank(int(rank[1])), None
    stem = re.split(r"\.(?:csv|tsv|jsonl?|log|txt|out|gz)\b", name)[0]
    hosts = [host for host in site.hosts if host == stem or host in re.split(r"[._]", stem)]
    if hosts:
        return None, hosts[0]
    host = _FILE_HOST.search(stem)
    return None, host[1] if host is not None else None


def orientation(column: str) -> int:
    """1: more is slower; -1: less is slower; 0: says nothing about speed."""
    meaning = meaning_of(column)
    if meaning is not None and meaning.field in ("step_s", "time"):
        return 1
    if meaning is not None and meaning.field in ("tokens_per_s", "samples_per_s", "tflops", "mfu"):
        return -1
    if meaning is not None or _STATE.search(column):
        return 0
    if _WAIT.search(column) and not _RATE.search(column):
        return -1
    if _RATE.search(column):
        return -1
    return 1 if _TIME.search(column) else 0


class _Unit(Value, frozen=True, kw_only=True):
    """One rank or host in one column."""

    name: Rank | str
    score: float
    """Times slower than the others, in the median over the last rounds."""
    share: float
    attempts: tuple[int, ...] = ()
    """Those in which it was slow in the median."""
    rounds: int
    line: int


class _Case(NamedTuple):
    """One column, who is slow in it, and everybody."""

    column: str
    slow: list[_Unit]
    units: list[_Unit]
    readings: list[Reading]


def compare(readings: Iterable[Reading], site: Site, file: str) -> list[Finding]:
    """Who is slow, in the column that says it best: at most one finding."""
    by_column: dict[str, list[Reading]] = defaultdict(list)
    for reading in list(readings)[-READINGS_MAX:]:
        by_column[reading.column].append(reading)
    extreme = _extreme(by_column, site, file)
    if extreme:
        return extreme
    best: tuple[tuple[bool, bool, float], _Case] | None = None
    for column, found in by_column.items():
        for name_of in (_host, _rank, _part):
            units = _units(found, orientation(column), name_of)
            slow = [unit for unit in units if _is_slow(unit)]
            if not slow or len(units) < UNITS_MIN:
                continue
            weight = (
                bool(_programs_doing(slow, found, site)),
                not _WAIT.search(column),
                max(unit.score for unit in slow),
            )
            if best is None or weight > best[0]:
                best = (weight, _Case(column, slow, units, found))
    return [] if best is None else [_finding(best[1], site, file)]


def _is_slow(unit: _Unit) -> bool:
    return unit.score >= SLOW_BY and unit.share >= ROUNDS_SHARE


def _host(reading: Reading) -> str | None:
    return reading.host


def _rank(reading: Reading) -> Rank | None:
    return reading.rank


def _part(reading: Reading) -> str | None:
    """One GPU of a host: the median of its eight hides it."""
    return f"{reading.host}{_GPU}{reading.part}" if reading.host and reading.part else None


def _units(
    readings: list[Reading], sign: int, name_of: Callable[[Reading], Rank | str | None]
) -> list[_Unit]:
    rounds: dict[tuple[int, int], dict[Rank | str, list[float]]] = defaultdict(dict)
    lines: dict[Rank | str, int] = {}
    for reading in readings:
        name = name_of(reading)
        if name is None or not reading.value > 0:
            continue
        rounds[reading.attempt, reading.round].setdefault(name, []).append(reading.value)
        lines[name] = reading.line
    ratios: dict[Rank | str, list[float]] = defaultdict(list)
    by_attempt: dict[Rank | str, dict[int, list[float]]] = defaultdict(dict)
    for (attempt, _), values in rounds.items():
        if len(values) < UNITS_MIN:
            continue
        typical = {name: _middle(found) for name, found in values.items()}
        for name, value in typical.items():
            others = _middle([v for other, v in typical.items() if other != name])
            if others > 0:
                ratio = value / others if sign > 0 else others / value
                ratios[name].append(ratio)
                by_attempt[name].setdefault(attempt, []).append(ratio)
    return [
        _Unit(
            name=name,
            score=_middle(_now(found)),
            share=_share(_now(found)),
            rounds=len(found),
            attempts=tuple(a for a, r in by_attempt[name].items() if _middle(r) >= SLOW_BY),
            line=lines[name],
        )
        for name, found in ratios.items()
    ]


def _now(ratios: list[float]) -> list[float]:
    """The last third of the rounds: what has passed is over, and what began late is not."""
    return ratios[-max(1, len(ratios) // 3) :]


def _share(ratios: list[float]) -> float:
    return sum(r >= SLOW_BY for r in ratios) / len(ratios)


def _middle(values: Sequence[float]) -> float:
    ordered = sorted(values)
    size = len(ordered)
    if not size:
        return 0.0
    return (ordered[size // 2] + ordered[(size - 1) // 2]) / 2


def _extreme(by_column: dict[str, list[Reading]], site: Site, file: str) -> list[Finding]:
    """A straggler detector that names the same rank as the slowest in most of its reports."""
    for low, high in (("extreme_etpt_n", "extreme_etpt_x"), ("extreme_rtt_x", "extreme_rtt_n")):
        slowest, fastest = by_column.get(low, []), by_column.get(high, [])
        if len(slowest) < 3 or len(fastest) < len(slowest):
            continue
        counts: dict[Rank, int] = defaultdict(int)
        for reading in slowest:
            if reading.rank is not None:
                counts[reading.rank] += 1
        rank, times = max(counts.items(), key=lambda entry: entry[1])
        pairs = [(s.value, f.value) for s, f in zip(slowest, fastest, strict=False)]
        apart = _middle([max(a, b) / max(min(a, b), 1e-9) for a, b in pairs])
        if times >= ROUNDS_SHARE * len(slowest) and apart >= SLOW_BY:
            unit = _Unit(
                name=rank,
                score=apart,
                share=times / len(slowest),
                rounds=len(slowest),
                line=slowest[-1].line,
            )
            return [_finding(_Case(low, [unit], [unit], slowest), site, file)]
    return []


def _finding(case: _Case, site: Site, file: str) -> Finding:
    column, _, units, readings = case
    slow = sorted(case.slow, key=lambda unit: -unit.score)
    worst = slow[0]
    hosts = _hosts(slow, readings, site)
    ranks = tuple(unit.name for unit in slow if isinstance(unit.name, int))
    said = (
        f"{_named(worst.name)} needs {worst.score:.2f} times what its peers need"
        f" ({column}, {worst.rounds} rounds)"
    )
    place = Place(file=file, line=worst.line, text=said)
    program = _programs_doing(slow, readings, site)
    many = len(slow) > 1 and len(hosts) != 1 and len(slow) > max(1, len(units) // 8)
    if program or many:
        why = f"{said}; {program or f'so do {len(slow)} of {len(units)}, on several machines'}"
        return replace(
            _SLOW,
            rule="peers.pattern",
            root=RootClass.USER_CODE if program else RootClass.AMBIGUOUS,
            action=FirstAction.ASK_USER if program else FirstAction.STOP_TIME_CHECK,
            why=why,
            place=place,
            undecided="whether it stays with the ranks when machines are exchanged",
        )
    return replace(
        _SLOW,
        why=f"{said}: it holds all others back",
        place=place,
        accused_ranks=tuple(Rank(rank) for rank in ranks),
        accused_machines=hosts,
    )


def _named(name: Rank | str) -> str:
    return f"rank {name}" if isinstance(name, int) else name


def _hosts(slow: list[_Unit], readings: list[Reading], site: Site) -> tuple[str, ...]:
    """Machines of the slow ones, as far as the rows or the site say it."""
    found: dict[str, None] = {}
    for unit in slow:
        if isinstance(unit.name, str):
            found[unit.name.partition(_GPU)[0]] = None
            continue
        said = {r.host for r in readings if r.rank == unit.name and r.host is not None}
        known = site.host_of(Rank(unit.name))
        for host in sorted(said) if said else ([known] if known else []):
            found[host] = None
    return tuple(found)


def _programs_doing(slow: list[_Unit], readings: list[Reading], site: Site) -> str:
    """Why it is no machine's fault: it follows the rank, or sits at one place of every machine."""
    for unit in slow:
        if not isinstance(unit.name, int):
            continue
        at: dict[str, None] = {}
        for reading in readings:
            known = reading.rank == unit.name and reading.attempt in unit.attempts
            if known and reading.host is not None:
                at[reading.host] = None
        if len(at) > 1:
            return f"it follows rank {unit.name} over {len(at)} machines ({', '.join(at)})"
    per = site.ranks_per_machine
    ranks = [unit.name for unit in slow if isinstance(unit.name, int)]
    if per and len(ranks) >= 3:
        places = {rank % per for rank in ranks}
        machines = {rank // per for rank in ranks}
        if len(places) == 1 and len(machines) >= 3:
            return f"so does local rank {places.pop()} on {len(machines)} machines"
    return ""
