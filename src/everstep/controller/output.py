"""The newest lines that the ranks wrote, for viewers. Bounded; the whole is in the ranks' logs.

Filled by agents.py, read by server.py. Numbers of lines grow over controllers, too: a viewer that
asks a restarted controller for what came after the last line it saw gets what is new.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import islice

from everstep.events import OutputLines
from everstep.model import Generation, Rank, Term, Value

LINES_MAX = 20_000
"""Lines kept: some minutes of a talkative job, a few MB of memory."""
LINE_CHARS_MAX = 4096
"""A longer line is cut: somebody printed a tensor."""
GATHER_S = 0.1
"""Pause before a waiting viewer is answered, so that a burst of lines is one answer."""
_TERM_SHIFT = 32
"""A term has room for four thousand million lines, and numbers stay below 2^53 (JSON)."""


class OutputLine(Value, frozen=True, kw_only=True):
    """One line that a rank wrote, without its end."""

    rank: Rank
    generation: Generation
    text: str


class OutputPage(Value, frozen=True, kw_only=True):
    """An answer to "what came after?"."""

    next: int
    """What to ask for next time."""
    lines: list[OutputLine]


class OutputRing:
    """Takes lines from agents, hands them to any number of viewers."""

    def __init__(self, term: Term) -> None:
        self._lines: deque[OutputLine] = deque(maxlen=LINES_MAX)
        self._next = term << _TERM_SHIFT
        self._more = asyncio.Event()
        self._closed = False

    def add(self, output: OutputLines) -> None:
        """Take new output of one rank; what the agent had to drop becomes a line that says so."""
        if output.dropped_bytes:
            self._add(output, f"[{output.dropped_bytes} bytes of output left out here]")
        for text in output.text.splitlines():
            self._add(output, text)
        self._tell()

    def after(self, number: int) -> OutputPage:
        """The lines from this number on, as far as they are still held."""
        first = self._next - len(self._lines)
        lines = list(islice(self._lines, max(0, number - first), None))
        return OutputPage(next=self._next, lines=lines)

    async def wait_after(self, number: int, wait_s: float) -> OutputPage:
        """The same, after waiting at most `wait_s` for a line if there is none yet."""
        if number >= self._next and not self._closed:
            try:
                await asyncio.wait_for(self._more.wait(), wait_s)
                await asyncio.sleep(GATHER_S)
            except TimeoutError:
                pass
        return self.after(number)

    def close(self) -> None:
        """The job is over: nobody needs to wait any more."""
        self._closed = True
        self._tell()

    def _add(self, output: OutputLines, text: str) -> None:
        line = OutputLine(
            rank=output.rank, generation=output.generation, text=text[:LINE_CHARS_MAX]
        )
        self._lines.append(line)
        self._next += 1

    def _tell(self) -> None:
        self._more.set()
        self._more = asyncio.Event()
