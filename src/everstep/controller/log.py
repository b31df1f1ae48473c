"""The controller's log: lines for people on standard output. Facts go to the journal, not here."""

from __future__ import annotations

import sys
import time


def say(text: str) -> None:
    """Write each line with the wall time in front. A full disk must not end the controller."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        sys.stdout.writelines(f"{stamp} controller: {line}\n" for line in text.splitlines())
        sys.stdout.flush()
    except OSError:
        pass
