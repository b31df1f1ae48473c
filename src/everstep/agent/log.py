"""The agent's log: lines for people on standard output. Facts go to the controller, not here."""

from __future__ import annotations

import sys
import time


def say(text: str) -> None:
    """Write one line with the wall time in front. A full disk must not end the agent."""
    try:
        sys.stdout.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} agent: {text}\n")
        sys.stdout.flush()
    except OSError:
        pass
