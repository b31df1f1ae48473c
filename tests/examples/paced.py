"""The GPT example, with time between its steps until somebody has broken what there is to break.

test_layouts.py has everstep run it as a script, as a user would run train.py itself, and runs the
same steps on ranks of its own.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LAYOUT = "fsdp-tp"
STEPS = 60
HELD_AT = STEPS - 10
"""From here on nothing is trained before the file at --stop is there."""
PACE_S = 0.2
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))


def train(log: Path, digest: Path, stop: Path | None) -> None:
    script: Any = importlib.import_module("train")
    data: Any = importlib.import_module("data")
    hand_out = data.Batches.next

    def paced(batches: Any) -> Any:
        while stop is not None and not stop.exists():
            time.sleep(PACE_S)
            if batches.position < HELD_AT:
                break
        return hand_out(batches)

    data.Batches.next = paced
    size = ("--layers", "1", "--width", "32", "--seq", "8", "--batch", "1", "--steps", str(STEPS))
    args = script.parse([*size, "--parallel", LAYOUT, "--digest", str(digest)])
    if dist.is_initialized():
        script.start_process_group = lambda: (dist.get_rank(), torch.device("cpu"))
    with log.open("a", buffering=1) as lines:
        script.train(args, lines)


def undisturbed(directory: str) -> None:
    """On ranks that everstep knows nothing of."""
    train(Path(directory) / "undisturbed.log", Path(directory) / "undisturbed", None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--losses", type=Path, required=True)
    parser.add_argument("--stop", type=Path, required=True)
    flags = parser.parse_args()
    train(flags.losses, flags.losses.with_suffix(""), flags.stop)
