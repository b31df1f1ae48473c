"""The training script of test_hangs.py: parallel.py with all that can hang, when it is asked to.

Eight ranks, tensor, data and pipeline parallel; those of the first stage have a data loader with a
worker of its own. A file RANK-TROUBLE in the directory of --ask, with a step and a number in it,
makes that rank do it once, in that step. It takes the file away before, so that the same step goes
well after a restart.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import everstep
from everstep.trainer.run import Run
from tests.integration import parallel
from tests.integration.parallel import Place, Stage, digest, log_of, numbers, one_step

FIFO = "answers-never"
EVER = 1_000_000_000
"""Steps, more than anybody waits for."""


class Trouble(StrEnum):
    """What a rank does once."""

    FIFO = "fifo"
    """It waits in a read of what nobody writes to."""
    LOCK = "lock"
    """Two of its threads take two locks in two orders."""
    SKIP = "skip"
    """It leaves out one collective."""
    EVALUATE = "evaluate"
    """It says that it evaluates, and does for so many seconds."""
    SAVE = "save"
    """It says that it writes a checkpoint of its own, for so many seconds; 0: it waits for a lock
    for ever."""
    COMPILE = "compile"
    """It says that it compiles, for so many seconds."""
    PAUSE = "pause"
    """It does nothing for so many seconds, and says nothing of it."""


class Asked:
    """The files that ask this rank."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory = directory
        self._rank = rank

    def now(self, step: int) -> dict[Trouble, float]:
        """What to do in this step."""
        found = {}
        for name in os.listdir(self.directory):  # noqa: PTH208 -- in every step of every rank
            rank, _, trouble = name.partition("-")
            path = self.directory / name
            if rank != str(self._rank):
                continue
            at, number = path.read_text().split()
            if step == int(at):
                path.unlink()
                found[Trouble(trouble)] = float(number)
        return found


def ask(directory: Path, trouble: Trouble, ranks: dict[int, int], number: float = 0.0) -> None:
    """Have these ranks do it, each in the step that is given for it."""
    for rank, step in ranks.items():
        path = directory / f"{rank}-{trouble}"
        beside = directory / f".{path.name}"
        beside.write_text(f"{step} {number}")
        beside.rename(path)


class Batches(Dataset[Tensor]):
    """One replica's, by step."""

    def __init__(self, dp: int) -> None:
        self._dp = dp

    def __getitem__(self, step: int) -> Tensor:
        return numbers(step, self._dp)


def batches(place: Place, start: int) -> Iterator[Tensor]:
    """From a worker on the first stage."""
    if place.pp > 0:
        return (numbers(step, place.dp) for step in range(start, EVER))
    steps = range(start, EVER)
    return iter(DataLoader(Batches(place.dp), batch_size=None, sampler=steps, num_workers=1))


def read_marker(fifo: Path) -> None:
    """A read that the kernel never comes back from. Its name shall not say so."""
    os.read(os.open(fifo, os.O_RDWR), 1)


def lock_twice() -> None:
    """Each of two threads has what the other one wants."""
    first, second, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def other() -> None:
        with second:
            both.wait()
            with first:
                pass

    threading.Thread(target=other, name="flusher", daemon=True).start()
    with first:
        both.wait()
        with second:
            pass


def evaluate(stage: Stage, seconds: float) -> None:
    """Busy, as an evaluation is."""
    until = time.monotonic() + seconds
    with torch.no_grad():
        while time.monotonic() < until:
            stage(torch.zeros(parallel.ROWS, parallel.WIDTH))
            time.sleep(0.05)


def save(seconds: float) -> None:
    """As slow as a file system, or stuck."""
    if seconds:
        time.sleep(seconds)
    else:
        lock_twice()


def make_trouble(run: Run, stage: Stage, asked: dict[Trouble, float], fifo: Path) -> None:
    """At the end of a step."""
    if Trouble.FIFO in asked:
        read_marker(fifo)
    if Trouble.LOCK in asked:
        lock_twice()
    if Trouble.PAUSE in asked:
        time.sleep(asked[Trouble.PAUSE])
    if Trouble.EVALUATE in asked:
        with run.evaluating():
            evaluate(stage, asked[Trouble.EVALUATE])
    if Trouble.SAVE in asked:
        with run.saving():
            save(asked[Trouble.SAVE])
    if Trouble.COMPILE in asked:
        with run.compiling():
            time.sleep(asked[Trouble.COMPILE])


def train(log: Path, stop: Path, ask_in: Path) -> None:
    """The loop, within a process group."""
    rank, place = dist.get_rank(), Place()
    asked = Asked(ask_in, rank)
    stage = Stage(place)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    run = everstep.attach()
    ckpt = run.checkpoint({"model": stage, "optimizer": optimizer})
    start = ckpt.restore()
    given = batches(place, start)
    with log_of(log, rank).open("a", buffering=1) as lines:
        for step in run.steps(start=start):
            now = asked.now(step)
            optimizer.zero_grad()
            one_step(place, stage, next(given))
            optimizer.step()
            lines.write(f"{step} {digest(stage, optimizer)}\n")
            ckpt.save(step)
            make_trouble(run, stage, now, ask_in / FIFO)
            if Trouble.SKIP not in now and agreed(stop.exists()):
                break
            time.sleep(parallel.STEP_S)


def agreed(stop: bool) -> bool:
    """Whether anybody wants to end."""
    anybody = torch.tensor(float(stop))
    dist.all_reduce(anybody)
    return anybody.item() > 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--losses", type=Path, required=True)
    parser.add_argument("--stop", type=Path, required=True)
    parser.add_argument("--ask", type=Path, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train(args.losses, args.stop, args.ask)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
