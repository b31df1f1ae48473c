"""`everstep checkpoint list`, `verify` and `export`: the steps that a job keeps on disk.

Works on what is stored alone, whether the job runs or not, on a path or a URL. Only `export` needs
torch, and imports it when it is called.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.table import Table

from everstep.checkpoint import stored
from everstep.checkpoint.stored import StoredStep
from everstep.checkpoint.tier import Tier, tier_at
from everstep.commands import jobs
from everstep.commands.screen import console
from everstep.commands.show import print_json
from everstep.model import Step, UserError
from everstep.paths import JobPaths

NEWEST = "newest"
GIB = 1 << 30


def list_steps(directory: str, *, json: bool) -> None:
    steps = stored.stored(tier_at(directory))
    if json:
        print_json(steps)
        return
    if not steps:
        sys.stdout.write(f"there is no published step in {directory}\n")
        return
    console().print(_table(steps))
    sys.stdout.write(f"in {directory}\n")


def verify(directory: str, step: str | None, *, json: bool) -> int:
    """Check all steps, or one; the exit code."""
    tier = tier_at(directory)
    if step is None:
        chosen = [item.step for item in stored.stored(tier)] or [stored.newest(tier)]
    else:
        chosen = [step_of(step, tier)]
    found = [stored.verify(tier, each) for each in chosen]
    if json:
        print_json(found)
    else:
        for item in found:
            good = f"step {item.step}: {item.world_size} shards are whole"
            for line in item.problems or (good,):
                sys.stdout.write(line + "\n")
    return 1 if any(item.problems for item in found) else 0


def export(directory: str, step: str, target: Path, *, json: bool) -> None:
    tier = tier_at(directory)
    chosen = step_of(step, tier)
    stored.find(tier, chosen)
    try:
        from everstep.checkpoint.export import export as write  # noqa: PLC0415 -- needs torch
    except ModuleNotFoundError as error:
        raise UserError(
            f"export needs torch, and this Python has no {error.name}: use the one that trains"
        ) from error
    done = write(tier, chosen, target)
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


def directory_of(job: JobPaths) -> str:
    """Where the job keeps its steps: a path, or a URL."""
    return jobs.spec_of(job).checkpoint.directory


def step_of(text: str, tier: Tier) -> Step:
    if text == NEWEST:
        return stored.newest(tier)
    if not text.isdigit():
        raise UserError(f"{text!r} is no step: give a number, or {NEWEST}")
    return Step(int(text))


def _table(steps: list[StoredStep]) -> Table:
    table = Table("step", "generation", "ranks", "GiB", box=None)
    for item in steps:
        table.add_row(
            str(item.step),
            str(item.generation),
            str(item.world_size),
            f"{item.stored_bytes / GIB:.2f}",
        )
    return table
