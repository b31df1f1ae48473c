"""Hands the lines that report training's numbers to the series analyser, and not too many.

Used by investigation.py on the pieces of a log. A log of gigabytes is mostly such lines, and to
read them costs far more than to find failures: beyond WHOLE_BYTES windows are read, so a spike
between two of them is not seen, while what lasts is. The end of a text is always read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from everstep.diagnosis.labels import speaker_of
from everstep.diagnosis.progress import PREFILTER
from everstep.diagnosis.scanner import Engine, Scanner
from everstep.diagnosis.series import HEADER_WITHIN, Collector
from everstep.diagnosis.text import clean

WHOLE_BYTES = 8 << 20
"""A text no larger than this is read to its last line: 40,000 lines of Megatron, five seconds."""
BEGIN_BYTES = 512 << 10
"""Of a larger one, or of unknown size, read at its beginning."""
WINDOW_BYTES = 4 << 10
"""Read of every piece after that."""
TAIL_BYTES = 128 << 10
"""Read of the last piece."""
_BREAK = re.compile(rb"\r\n|\n|\r")


class MetricLines:
    """One text's lines on their way to the collector."""

    def __init__(
        self,
        file: str,
        collector: Collector,
        scanner: Scanner,
        attempt: int,
        size_bytes: int | None,
    ) -> None:
        """`size_bytes`: of the whole text, if known."""
        small = size_bytes is not None and size_bytes <= WHOLE_BYTES
        self._whole_bytes = WHOLE_BYTES if small else BEGIN_BYTES
        self._file = file
        self._collector = collector
        self._scanner = scanner
        self._attempt = attempt
        self._read_bytes = 0
        self._began = False
        self._held: tuple[bytes, int] | None = None

    def piece(self, text: bytes, first_line: int) -> None:
        """Whole lines; the number of the first one."""
        if not self._began:
            self._begin(text, first_line)
        if (
            self._collector.is_table(self._file)
            or self._read_bytes + len(text) <= self._whole_bytes
        ):
            self._read(text, first_line)
            return
        window = max(WINDOW_BYTES, self._whole_bytes - self._read_bytes)
        cut = (text.find(b"\n", min(window, len(text) - 1)) + 1) or len(text)
        self._read(text[:cut], first_line)
        last = max(text.rfind(b"\n", 0, max(0, len(text) - TAIL_BYTES)) + 1, cut)
        self._held = (text[last:], first_line + text.count(b"\n", 0, last))

    def finish(self) -> None:
        """The end of the last piece, which was held back."""
        if self._held is not None:
            self._read(*self._held)
            self._held = None

    def _begin(self, text: bytes, first_line: int) -> None:
        self._began = True
        for number, raw in enumerate(_BREAK.split(text, HEADER_WITHIN)[:HEADER_WITHIN]):
            self._line(raw, first_line + number)

    def _read(self, text: bytes, first_line: int) -> None:
        self._held = None
        skip_to = first_line + HEADER_WITHIN if self._read_bytes == 0 else first_line
        self._read_bytes += len(text)
        if self._collector.is_table(self._file):
            for number, raw in enumerate(_BREAK.split(text)):
                if first_line + number >= skip_to:
                    self._line(raw, first_line + number)
            return
        number, at = first_line, 0
        for line in self._scanner.lines(text):
            number += text.count(b"\n", at, line.start) + text.count(b"\r", at, line.start)
            at = line.start
            if number >= skip_to:
                self._line(text[line.start : line.end], number)

    def _line(self, raw: bytes, number: int) -> None:
        shown = clean(raw)
        speaker, _ = speaker_of(shown)
        self._collector.line(self._file, shown, number, speaker, self._attempt)


def metric_scanner(engine: Callable[[list[bytes]], Engine], of_site: Sequence[str] = ()) -> Scanner:
    """Looks for lines that may report numbers, also in a site's own forms; made once."""
    return Scanner([*PREFILTER, *of_site], engine)
