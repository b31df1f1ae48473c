"""`python -m everstep.sim`: run seeds, or show one seed with all that happens in it."""

from __future__ import annotations

import argparse
import sys

import msgspec

from everstep.sim.options import draw
from everstep.sim.run import RunFailed, run


def main(arguments: list[str]) -> int:
    """0 if every promise was kept."""
    parser = argparse.ArgumentParser(prog="python -m everstep.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="only this one, and show all of it")
    asked = parser.parse_args(arguments)
    seeds = range(asked.first, asked.first + asked.seeds)
    if asked.seed is not None:
        seeds = range(asked.seed, asked.seed + 1)
        _say(msgspec.json.format(msgspec.json.encode(draw(asked.seed))).decode())
    failed = 0
    for seed in seeds:
        try:
            report = run(draw(seed)) if asked.seed is None else run(draw(seed), _say)
        except RunFailed as problem:
            failed += 1
            _say(problem)
        else:
            if asked.seed is not None:
                _say(report)
    _say(f"{len(seeds)} seeds, {failed} failed")
    return 1 if failed else 0


def _say(what: object) -> None:
    sys.stdout.write(f"{what}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
