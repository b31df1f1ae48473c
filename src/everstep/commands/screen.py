"""The terminal of a viewer: lines of ranks on standard output, everstep's own on standard error.

On a terminal a progress line stays below everything else; elsewhere it is a plain line every few
seconds. Knows nothing of jobs.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

PLAIN_EVERY_S = 5.0
"""Between two progress lines where there is no terminal: a log is read later, and by searching."""


PLAIN_COLUMNS = 120
"""Width of tables where there is no terminal that says how wide it is."""


def console(*, stderr: bool = False) -> Console:
    """A console that does not guess at numbers and is not squeezed where nobody looks."""
    made = Console(stderr=stderr, highlight=False)
    if not made.is_terminal:
        made.width = max(made.width, PLAIN_COLUMNS)
    return made


class Screen:
    """Where a viewer writes. A terminal that is lost raises OSError from any method."""

    def __init__(self, *, output: TextIO | None = None) -> None:
        """`output`: where lines of ranks go, standard output by default."""
        self._out = sys.stdout if output is None else output
        self._console = console(stderr=True)
        self._live: Live | None = None
        self._progress = ""
        self._plain_at = time.monotonic() + PLAIN_EVERY_S

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def rank_lines(self, lines: list[str]) -> None:
        """Lines that ranks wrote, all at once: a talkative job writes thousands a second."""
        if not lines:
            return
        if self._live is not None and self._out.isatty():
            # Through the console, which keeps the progress line below them.
            self._console.print(Text("\n".join(lines)), soft_wrap=True)
        else:
            self._out.write("\n".join(lines) + "\n")
            self._out.flush()

    def say(self, sentence: str) -> None:
        """One sentence of everstep's own."""
        self._console.print(Text(f"everstep: {sentence}"), soft_wrap=True)

    def show(self, content: RenderableType) -> None:
        self._console.print(content, soft_wrap=isinstance(content, Text))

    def progress(self, line: str) -> None:
        if self._live is not None:
            self._live.update(Text(f"everstep: {line}", style="dim", no_wrap=True))
        elif time.monotonic() >= self._plain_at and line != self._progress:
            self._plain_at = time.monotonic() + PLAIN_EVERY_S
            self._progress = line
            self.say(line)
