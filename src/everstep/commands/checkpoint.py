"""`everstep checkpoint list`, `verify` and `export`: the steps that a job keeps on disk.

Works on the files alone, whether the job runs or not and wherever they are. Only `export` needs
torch, and imports it when it is called.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rich.table import Table

from everstep.checkpoint import stored
from everstep.checkpoint.stored import StoredStep
from everstep.commands import jobs
from everstep.commands.screen import console
from everstep.commands.show import print_json
from everstep.model import Step, UserError
from everstep.paths import JobPaths

NEWEST = "newest"
GIB = 1 << 30


def list_steps(directory: Path, *, json: bool) -> None:
    steps = stored.stored(directory)
    if json:
        print_json(steps)
        return
    if not steps:
        sys.stdout.write(f"there is no published step in {directory}\n")
        return
    console().print(_table(steps, time.time()))
    sys.stdout.write(f"in {directory}\n")


def verify(directory: Path, step: str | None, *, json: bool) -> int:
    """Check all steps, or one; the exit code."""
    if step is None:
        chosen = [item.step for item in stored.stored(directory)] or [stored.newest(directory)]
    else:
        chosen = [step_of(step, directory)]
    found = [stored.verify(directory, each) for each in chosen]
    if json:
        print_json(found)
    else:
        for item in found:
            good = f"step {item.step}: {item.world_size} shards are whole"
            for line in item.problems or (good,):
                sys.stdout.write(line + "\n")
    return 1 if any(item.problems for item in found) else 0


def export(directory: Path, step: str, target: Path, *, json: bool) -> None:
    chosen = step_of(step, directory)
    stored.find(directory, chosen)
    try:
        from everstep.checkpoint.export import export as write  # noqa: PLC0415 -- needs torch
    except ModuleNotFoundError as error:
        raise UserError(
            f"export needs torch, and this Python has no {error.name}: use the one that trains"
        ) from error
    done = write(directory, chosen, target)
    if json:
        print_json(done)
        return
    for note in done.notes:
        sys.stderr.write(f"everstep: {note}\n")
    size = done.tensor_bytes / GIB
    sys.stdout.write(
        f"step {chosen} is in {target}: {done.keys} keys, {size:.2f} GiB of tensors, for "
        "torch.distributed.checkpoint.load()\n"
    )


def directory_of(job: JobPaths) -> Path:
    """Where the job keeps its steps."""
    return Path(jobs.spec_of(job).checkpoint.directory)


def step_of(text: str, directory: Path) -> Step:
    if text == NEWEST:
        return stored.newest(directory)
    if not text.isdigit():
        raise UserError(f"{text!r} is no step: give a number, or {NEWEST}")
    return Step(int(text))


def _table(steps: list[StoredStep], now_s: float) -> Table:
    table = Table("step", "generation", "ranks", "GiB", "age", box=None)
    for item in steps:
        minutes = max(0.0, now_s - item.published_at_s) / 60
        table.add_row(
            str(item.step),
            str(item.generation),
            str(item.world_size),
            f"{item.disk_bytes / GIB:.2f}",
            f"{minutes:.0f} min",
        )
    return table
