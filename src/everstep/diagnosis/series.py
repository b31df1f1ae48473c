"""What the numbers of a training run say, after the fact: the series analyser of diagnosis.

Used by diagnosis' reading of inputs: it gives a Collector the lines that match progress.PREFILTER
(all lines of a file that a header opens), and takes the findings at the end. The judging is
signals.Judge's, the same that runs while a job trains; here the whole series is known, so a spike
that recovered, a slow-down that passed and a loss scaler's search are told from what lasted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise

from msgspec.structs import replace

from everstep.diagnosis.abnormal import Kind, Limits, Signal
from everstep.diagnosis.columns import Table
from everstep.diagnosis.findings import NOBODY, Finding, Place, Site, Speaker
from everstep.diagnosis.levels import blocks, is_ramp, noise_of
from everstep.diagnosis.metric_names import TOLD
from everstep.diagnosis.peers import READINGS_MAX, PeerReader, Reading, compare, unit_of
from everstep.diagnosis.progress import Pattern, Reader
from everstep.diagnosis.sample import Sample
from everstep.diagnosis.signals import Judge
from everstep.diagnosis.words import Category, FirstAction, Grade, Role, RootClass
from everstep.model import Rank

SAMPLES_MAX = 50_000
"""Of one file; older ones are forgotten."""
HEADER_WITHIN = 5
"""Lines of a file among which a table's header may stand."""
SHORT = 150
"""Fewer samples than this are judged with a shorter past."""
SHIFT = 0.92
"""Of a whole series that lies there, a fall to this share is seen where the noise is small."""
SHIFT_SAMPLES_MIN = 60
GROWTH = 1.15
"""Host memory that grew by this factor along with the step time is part of the story."""


_NUMERIC = Finding(
    rule="series.diverged",
    role=Role.ROOT,
    category=Category.NAN_VALUE,
    root=RootClass.AMBIGUOUS,
    grade=Grade.NUMERIC,
    action=FirstAction.ASK_USER,
    why="",
)
_SPEED = replace(
    _NUMERIC,
    rule="series.slower",
    category=Category.MFU_DECLINE,
    grade=Grade.SPEED,
    action=FirstAction.STOP_TIME_CHECK,
)
_PASSED = {"role": Role.CONFIRM, "action": FirstAction.NONE}
"""Told, and no reason to act: it never outweighs a cause."""


class Collector:
    """All texts of one diagnosis."""

    def __init__(self, patterns: Iterable[Pattern] = ()) -> None:
        self._patterns = tuple(patterns)
        self._files: dict[str, _File] = {}

    def line(
        self, file: str, text: str, line: int, speaker: Speaker = NOBODY, attempt: int | None = None
    ) -> None:
        """One line; the first HEADER_WITHIN ones of every file, then what the pre-filter lets
        through, or everything if is_table(file).
        """
        known = self._files.get(file)
        if known is None:
            known = self._files[file] = _File(file, self._patterns)
        known.line(text, line, speaker, attempt)

    def is_table(self, file: str) -> bool:
        """Whether a header was found: then every line of the file is wanted."""
        known = self._files.get(file)
        return known is not None and known.table is not None

    def findings(self, site: Site) -> list[Finding]:
        """What all that was collected says."""
        named: list[Reading] = []
        found: list[Finding] = []
        for name, file in self._files.items():
            readings = file.readings(site)
            if unit_of(name, site) == (None, None):
                found += compare(readings, site, name)
            else:
                named += readings
        found += compare(named, site, "")
        for file in self._files.values():
            found += file.findings()
        return found


class _File:
    """One text: a log, or a table."""

    def __init__(self, name: str, patterns: tuple[Pattern, ...]) -> None:
        self._name = name
        self._unit = unit_of(name, Site())
        self.table: Table | None = None
        self._seen = 0
        self._reader = Reader(patterns)
        self._peers = PeerReader()
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)
        self._readings: deque[Reading] = deque(maxlen=READINGS_MAX)

    def line(self, text: str, line: int, speaker: Speaker, attempt: int | None) -> None:
        self._seen += 1
        if self.table is None and self._seen <= HEADER_WITHIN and not self._samples:
            self.table = Table.of(text, self._name)
            if self.table is not None:
                return
        if self.table is not None:
            row = self.table.row(text, line)
            if row is not None:
                self._take(row.sample, speaker, attempt)
                units = self.table.units if self.table.wide else ()
                if row.rank is None and row.host is None:
                    row = replace(row, rank=self._unit[0], host=self._unit[1])
                self._readings.extend(self._peers.row(row, units))
                return
        for sample in self._reader.read(text, line):
            self._take(sample, speaker, attempt)
        self._readings.extend(self._peers.line(text, line, speaker))

    def _take(self, sample: Sample | None, speaker: Speaker, attempt: int | None) -> None:
        if sample is None:
            return
        changes: dict[str, object] = {}
        if sample.rank is None and speaker.rank is not None:
            changes["rank"] = speaker.rank
        if sample.host is None and speaker.machine is not None:
            changes["host"] = speaker.machine
        if sample.attempt is None and attempt is not None:
            changes["attempt"] = attempt
        self._samples.append(replace(sample, **changes) if changes else sample)

    def readings(self, site: Site) -> list[Reading]:
        """Of ranks and hosts; a file that is named after one is all its own."""
        rank, host = unit_of(self._name, site)
        found = list(self._readings) + _readings_of(self._samples, rank, host)
        if rank is None and host is None:
            return found
        return [
            reading
            if reading.rank is not None or reading.host is not None
            else replace(reading, rank=rank, host=host)
            for reading in found
        ]

    def findings(self) -> list[Finding]:
        for sample in self._reader.end():
            self._samples.append(sample)
        return analyse(list(self._samples), self._name)


def _readings_of(samples: Iterable[Sample], rank: Rank | None, host: str | None) -> list[Reading]:
    """Step times that each rank or host reports for itself."""
    named = rank is not None or host is not None
    return [
        Reading(
            column="step_s",
            value=sample.step_s,
            round=sample.step,
            rank=sample.rank,
            host=sample.host,
            attempt=sample.attempt or 0,
            line=sample.line,
        )
        for sample in samples
        if sample.step_s is not None
        and (sample.form not in ("table", "dict", "bar") or named)
        and (sample.rank is not None or sample.host is not None or named)
    ]


def analyse(samples: Sequence[Sample], file: str = "") -> list[Finding]:
    """Findings about one text's samples; one that says "nothing unusual" if that is so.

    Several ranks may print into it: the one that says most is judged, of the others only values
    that are not finite count.
    """
    streams = _streams(samples)
    if not streams:
        return []
    main = max(
        streams.values(), key=lambda found: (sum(s.loss is not None for s in found), len(found))
    )
    story = _Story(main, file)
    found = story.numeric() + story.speed()
    lonely = _lonely_nan(streams, main, file) if not any(f.role is Role.ROOT for f in found) else []
    return found + lonely or story.nothing()


def _streams(samples: Sequence[Sample]) -> dict[tuple[Rank | None, str | None], list[Sample]]:
    streams: dict[tuple[Rank | None, str | None], list[Sample]] = {}
    for sample in samples:
        streams.setdefault((sample.rank, sample.host), []).append(sample)
    return {who: _of_one_printer(stream) for who, stream in streams.items()}


def _of_one_printer(stream: list[Sample]) -> list[Sample]:
    """Without the lines of other ranks, where several print each step and do not say who they are.

    Two lines of one step that tell different things are one rank's.
    """
    again = [
        earlier.step == later.step and _told(earlier) == _told(later)
        for earlier, later in pairwise(stream)
    ]
    if sum(again) < len(stream) // 2:
        return stream
    return [
        stream[0],
        *(sample for sample, same in zip(stream[1:], again, strict=True) if not same),
    ]


def _told(sample: Sample) -> tuple[str, ...]:
    return tuple(name for name in TOLD if getattr(sample, name) is not None)


def _lonely_nan(
    streams: dict[tuple[Rank | None, str | None], list[Sample]], main: list[Sample], file: str
) -> list[Finding]:
    """One rank's own loss is not finite to its end, while the others' is."""
    bad = [
        (key, found)
        for key, found in streams.items()
        if found is not main and found[-1].loss is not None and not math.isfinite(found[-1].loss)
    ]
    if not bad:
        return []
    key, found = bad[0]
    since = next(s for s in reversed(found) if s.loss is not None)
    who = f"rank {key[0]}" if key[0] is not None else str(key[1])
    why = f"the loss of {who} is not finite at step {since.step}, that of others is"
    return [
        replace(
            _NUMERIC,
            rule="series.lonely_nan",
            action=FirstAction.STOP_TIME_CHECK,
            why=why,
            place=_place(file, since.line, why),
        )
    ]


class _Story:
    """One stream, from its first sample to its last."""

    def __init__(self, samples: list[Sample], file: str) -> None:
        self._samples = samples
        self._file = file
        judge = Judge(limits_for(samples))
        self._signals = [signal for sample in samples for signal in judge.handle(sample)]
        self._signals += judge.end()
        self._main = [s for s in samples if s.form not in ("overflow", "deepspeed", "speed")]

    def numeric(self) -> list[Finding]:
        """Values that are not finite, jumps, the loss scaler: what lasts before what passed."""
        open_ = self._open({Kind.NOT_FINITE, Kind.MISSING, Kind.JUMP, Kind.RISE, Kind.SCALE})
        for kind, tell in (
            (Kind.NOT_FINITE, self._not_finite),
            (Kind.MISSING, self._not_finite),
            (Kind.SCALE, self._scale),
            (Kind.JUMP, self._diverged),
            (Kind.RISE, self._diverged),
        ):
            lasting = [signal for signal in open_ if signal.kind is kind]
            if lasting:
                return [tell(lasting)]
        return self._passed()

    def _open(self, kinds: set[Kind]) -> list[Signal]:
        """Signals that nothing took back."""
        state: dict[tuple[str, Kind], Signal | None] = {}
        for signal in self._signals:
            if signal.kind is Kind.RECOVERED and signal.of is not None:
                state[signal.metric, signal.of] = None
                if signal.of is Kind.JUMP:
                    state[signal.metric, Kind.RISE] = None
            elif signal.kind in kinds:
                state[signal.metric, signal.kind] = signal
        found = [signal for signal in state.values() if signal is not None]
        return sorted(found, key=lambda signal: (signal.first_bad, signal.metric != "loss"))

    def _not_finite(self, signals: list[Signal]) -> Finding:
        first = signals[0]
        away = [
            s for s in self._signals if s.kind in (Kind.JUMP, Kind.SCALE) and s.step <= first.step
        ]
        early = first.first_bad - self._samples[0].step < 10 and self._samples[0].step < 10
        again = [
            s
            for s in self._signals
            if s.kind is Kind.NOT_FINITE and s is not first and s.first_bad == first.first_bad
        ]
        why = f"{first.why}, to the end of the log"
        action, root = FirstAction.STOP_TIME_CHECK, RootClass.AMBIGUOUS
        if away:
            why += f"; before it, {away[-1].why}: training diverged"
            action = FirstAction.ASK_USER
        elif again:
            why += "; the run before it ended at the same step: code or data, not a machine"
            action, root = FirstAction.ASK_USER, RootClass.USER_CODE
        elif early:
            why += "; it was so from the first steps on"
            action = FirstAction.ASK_USER
        return replace(
            _NUMERIC,
            rule="series.not_finite",
            root=root,
            action=action,
            why=why,
            place=_place(self._file, first.line, why),
            undecided="a rerun of the step before it on other machines: the same bits are code or"
            " data, other bits are hardware",
        )

    def _scale(self, signals: list[Signal]) -> Finding:
        why = f"{signals[0].why}: gradients overflow in every step"
        return replace(
            _NUMERIC,
            rule="series.loss_scale",
            why=why,
            place=_place(self._file, signals[0].line, why),
            undecided="whether an older version or a smaller learning rate trains on",
        )

    def _diverged(self, signals: list[Signal]) -> Finding:
        first = signals[0]
        why = f"{first.why}, and does not come back"
        return replace(
            _NUMERIC,
            why=why,
            place=_place(self._file, first.line, why),
            undecided="a rerun from a step before it, with the same and with other data",
        )

    def _passed(self) -> list[Finding]:
        """Something was abnormal and training went on: worth telling, no reason to act."""
        over = [s for s in self._signals if s.kind is Kind.RECOVERED and s.metric != "speed"]
        left = [
            s
            for s in self._main
            if any(v is not None and not math.isfinite(v) for v in (s.loss, s.grad_norm))
        ]
        if not over and (not left or self._searched(left)):
            return []
        lost = (Kind.NOT_FINITE, Kind.MISSING)
        rerun = [s for s in over if s.of in lost and s.step <= s.first_bad]
        if rerun:
            return [self._not_again(rerun[-1])]
        if over:
            worst = max(over, key=lambda s: (s.of in (Kind.NOT_FINITE, Kind.MISSING), s.lasted))
            why, line = worst.why, worst.line
            if len(over) > 1:
                why += f"; {len(over)} such events, each followed by normal steps"
        else:
            why = f"{len(left)} steps were not finite, were left out, and training went on"
            line = left[0].line
        return [
            replace(
                _NUMERIC,
                rule="series.recovered",
                why=why,
                place=_place(self._file, line, why),
                undecided="whether it comes again, and at the same data",
                **_PASSED,
            )
        ]

    def _not_again(self, signal: Signal) -> Finding:
        """Bad to the end of a run, and finite when the same steps were done again."""
        why = (
            f"{signal.metric} was not finite from step {signal.first_bad} on, and was finite there"
            " when the steps were done again: not data or code alone"
        )
        return replace(
            _NUMERIC,
            rule="series.not_again",
            action=FirstAction.STOP_TIME_CHECK,
            why=why,
            place=_place(self._file, signal.line, why),
            undecided="whether machines, data order or configuration changed in between",
        )

    def _searched(self, left: list[Sample]) -> bool:
        """At the start only, and of the gradients only: the loss scaler's search."""
        first = self._samples[0].step
        finite = all(s.loss is None or math.isfinite(s.loss) for s in left)
        return finite and first < 100 and left[-1].step - first <= 100

    # --- speed -----------------------------------------------------------------------------------

    def speed(self) -> list[Finding]:
        """A ramp, a fall to a lower level that lasts, or one that passed."""
        ramps = self._ramps()
        if ramps:
            return [self._ramp(ramps)]
        slow = [s for s in self._open({Kind.SLOW, Kind.RAMP}) if s.metric == "speed"]
        if slow:
            return [self._slower(slow[-1])]
        over = [
            s
            for s in self._signals
            if s.kind is Kind.RECOVERED and s.metric == "speed" and s.of is not Kind.SAG
        ]
        shift = self._shift()
        if shift is not None:
            return [shift]
        if not over or self._regular(over):
            return []
        return [
            replace(
                _SPEED,
                rule="series.slow_for_a_while",
                root=RootClass.TRANSIENT,
                why=over[-1].why,
                place=_place(self._file, over[-1].line, over[-1].why),
                undecided="what else used the network or the storage at that time",
                **_PASSED,
            )
        ]

    def _regular(self, over: list[Signal]) -> bool:
        """At equal distances: evaluations and saves are part of training."""
        at = [s.first_bad for s in over]
        gaps = [b - a for a, b in pairwise(at)]
        return len(gaps) >= 2 and max(gaps) - min(gaps) <= 0.15 * max(gaps)

    def _ramps(self) -> list[list[Sample]]:
        """Attempts in which speed fell bit by bit."""
        return [
            part
            for part in _attempts(self._main)
            if len(part) >= 12 and is_ramp(_speeds(part)[len(part) // 20 :], 0.8)
        ]

    def _ramp(self, ramps: list[list[Sample]]) -> Finding:
        part = max(ramps, key=len)
        speeds = blocks(_speeds(part), 6)
        why = (
            f"speed falls bit by bit to {speeds[-1] / speeds[0]:.0%} over {len(part)} reports:"
            " a ramp, not a step"
        )
        memory = blocks([s.host_gb for s in part if s.host_gb is not None], 6)
        grows = len(memory) >= 4 and memory[-1] >= GROWTH * memory[0]
        if grows:
            why += f", along with host memory from {memory[0]:.0f} to {memory[-1]:.0f} GB"
        if len(ramps) > 1:
            why += f"; it begins anew in each of {len(ramps)} attempts: a restart seems to help"
        return replace(
            _SPEED,
            rule="series.ramp",
            root=RootClass.USER_CODE if grows or len(ramps) > 1 else RootClass.AMBIGUOUS,
            action=FirstAction.ASK_USER,
            why=why,
            place=_place(self._file, part[-1].line, why),
            undecided="what grows with the step count: memory, a list, a cache, a log",
        )

    def _shift(self) -> Finding | None:
        """A fall that is smaller than the live rule's, but far outside the noise, to the end."""
        part = self._main
        speeds = [s.speed for s in part if s.speed is not None]
        if len(speeds) < SHIFT_SAMPLES_MIN or len(speeds) < len(part) * 0.9:
            return None
        parts = blocks(speeds[len(speeds) // 20 :], 10)
        before, after = parts[: len(parts) // 2], parts[-3:]
        noise = noise_of(speeds)
        level = sorted(before)[len(before) // 2]
        steady = max(before) - min(before) <= 0.04 * level + 4 * noise
        fell = max(after) <= SHIFT * level and level - max(after) >= 6 * noise
        if not steady or not fell:
            return None
        why = (
            f"speed is {after[-1] / level:.0%} of what it was in the first half of the series,"
            " far outside its noise, to the end"
        )
        return replace(_SPEED, why=why, place=_place(self._file, part[-1].line, why))

    def _slower(self, signal: Signal) -> Finding:
        parts = _attempts(self._main)
        at_restart = any(
            abs(part[0].step - signal.first_bad) <= max(10, len(part) // 10) for part in parts[1:]
        )
        why = f"{signal.why}, and it stays there"
        if at_restart:
            why += "; it began with a restart: machines, code or configuration changed"
        return replace(
            _SPEED,
            why=why,
            place=_place(self._file, signal.line, why),
            undecided="step times of each rank, clocks and link errors of each machine",
        )

    def nothing(self) -> list[Finding]:
        """Numbers were read and nothing is wrong with them."""
        losses = [s.loss for s in self._main if s.loss is not None]
        if len(self._main) < 2 or not losses:
            return []
        first, last = self._main[0], self._main[-1]
        why = (
            f"steps {first.step} to {last.step}: loss {losses[0]:.4g} to {losses[-1]:.4g},"
            " nothing unusual"
        )
        return [
            replace(
                _NUMERIC,
                rule="series.steady",
                role=Role.NOISE,
                category=Category.NONE,
                root=RootClass.NONE,
                action=FirstAction.NONE,
                why=why,
                place=_place(self._file, last.line, why),
            )
        ]


def limits_for(samples: Sequence[Sample]) -> Limits:
    """The default limits, with a shorter past for a short series."""
    count = len(samples)
    if count >= SHORT:
        return Limits()
    steps = max(0, samples[-1].step - samples[0].step) if samples else 0
    return Limits(
        skip_steps=min(50, steps // 8),
        base=max(5, min(20, count // 5)),
        settle=min(5, max(1, count // 12)),
    )


def _attempts(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Runs of the job: steps go back, or the report says it."""
    parts: list[list[Sample]] = []
    for sample in samples:
        last = parts[-1][-1] if parts else None
        next_epoch = (
            last is not None
            and last.epoch is not None
            and sample.epoch is not None
            and sample.epoch > last.epoch
        )
        if (
            last is None
            or sample.attempt != last.attempt
            or (sample.step < last.step and not next_epoch)
        ):
            parts.append([])
        parts[-1].append(sample)
    return parts


def _speeds(samples: Sequence[Sample]) -> list[float]:
    return [s.speed for s in samples if s.speed is not None]


def _place(file: str, line: int, text: str) -> Place:
    return Place(file=file, line=line, text=text)
