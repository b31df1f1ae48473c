"""`python -m everstep.controller JOB_DIR`: the controller of one job. Entry point only."""

from __future__ import annotations

import argparse
import sys

from everstep.controller.run import Options, run
from everstep.journal import Fenced
from everstep.model import EverstepError

EXIT_FENCED = 3
"""Another controller took over; there is nothing to do about it."""


def main(arguments: list[str]) -> int:
    """Run it; returns the exit code. An error is one sentence on standard error."""
    parser = argparse.ArgumentParser(prog="everstep controller", description=__doc__)
    parser.add_argument("job_dir", help="directory of the job")
    parser.add_argument("--resume", action="store_true", help="replace a living controller")
    parser.add_argument(
        "--resume-if-needed",
        action="store_true",
        help="wait until a living controller is gone, then go on (what a keeper starts)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="0: the former one, else any")
    options = Options(**vars(parser.parse_args(arguments)))
    try:
        return run(options)
    except Fenced as error:
        sys.stderr.write(f"everstep controller: {error}\n")
        return EXIT_FENCED
    except EverstepError as error:
        sys.stderr.write(f"everstep controller: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
