"""`make check`: formatter, linter, types and import contract, side by side; all are run to the end.

Prints what failed and one line per check. `make test` runs it first.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

BIN = Path(sys.executable).parent
CHECKS: dict[str, list[str]] = {
    "format": [str(BIN / "ruff"), "format", "--check", "."],
    "lint": [str(BIN / "ruff"), "check", "."],
    "types": [str(BIN / "mypy")],
    "imports": [str(BIN / "lint-imports")],
}


def main() -> int:
    started = time.monotonic()
    running = {
        name: subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        for name, argv in CHECKS.items()
    }
    failed = []
    for name, process in running.items():
        text, _ = process.communicate()
        if process.returncode:
            failed.append(name)
            print(text, end="")
    seconds = time.monotonic() - started
    good = ", ".join(name for name in CHECKS if name not in failed)
    print(
        f"check: {good or 'nothing'} ok; {', '.join(failed) or 'nothing'} failed ({seconds:.0f} s)"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
