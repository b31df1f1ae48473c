"""The `everstep` command, also as `python -m everstep`.

The base installation is what a training image needs and has no command line; this file says so in
one sentence instead of a traceback. Everything else is cli.py's.
"""

from __future__ import annotations

import sys

_COMMAND_LINE = ("typer", "rich", "httpx2", "websockets", "starlette", "uvicorn")


def main() -> None:
    try:
        from everstep.cli import main as command_line  # noqa: PLC0415 -- that is the point
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _COMMAND_LINE:
            raise
        sys.exit(
            f"everstep: {error.name} is not installed: the command line needs "
            "pip install 'everstep[controller]'; a training script needs everstep alone."
        )
    command_line()


if __name__ == "__main__":
    main()
