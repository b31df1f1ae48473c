"""A rank that prints lines which rules speak about, one after the other, and when it did.

Used by bench/diagnose.py; the time is wall-clock seconds, as the controller's journal has them.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

LINES = (
    "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "OSError: [Errno 24] Too many open files: '/data/shard-00017.tar'",
    "OSError: [Errno 116] Stale file handle: '/mnt/nfs/data/x.bin'",
    "KeyError: 'gloss_en'",
    "ModuleNotFoundError: No module named 'apex'",
    "socket.gaierror: [Errno -3] Temporary failure in name resolution",
    "double free or corruption (!prev)",
    "Segmentation fault (core dumped)",
    "RuntimeError: can't start new thread",
)
EVERY_S = 0.73
"""No multiple of any interval at which somebody looks."""


def main() -> None:
    """Print all lines; write down when, beside their number."""
    marks = Path(sys.argv[sys.argv.index("--marks") + 1])
    said = marks / f"said-{os.environ['RANK']}"
    time.sleep(2)
    with said.open("w") as file:
        for line in LINES:
            time.sleep(EVERY_S)
            file.write(f"{time.time()} {line}\n")
            file.flush()
            print(line, flush=True)
    time.sleep(2)


if __name__ == "__main__":
    main()
