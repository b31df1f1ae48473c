"""The training script of test_lost_groups.py: tensor, data and pipeline parallel, by hand.

Eight ranks in the order tp, dp, pp. Each stage is one perceptron whose inner width is cut in two
(tensor parallel: one sum forward, one backward), stages hand activations up and gradients down, and
gradients are averaged over replicas. No two ranks hold the same: every shard has to survive. Sums
of two numbers have the same bits in either order, so every run gives the same.

Each rank writes a line per finished step: a digest of its parameters and its optimizer's state. It
trains until somebody puts a file where --stop says; then all ranks end after the same step.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import everstep

TP, DP, PP = 2, 2, 2
RANKS = TP * DP * PP
WIDTH, INNER, ROWS = 16, 32, 8
STEP_S = 0.1
"""Time in which a step does nothing: leaves processor time to what is under test."""


class Place:
    """Where this rank is in the mesh, and its groups."""

    def __init__(self) -> None:
        rank = dist.get_rank()
        self.tp, self.dp, self.pp = rank % TP, rank // TP % DP, rank // (TP * DP)
        self.above, self.below = rank + TP * DP, rank - TP * DP
        self.tensor = _group_of(rank, [[r, r + 1] for r in range(0, RANKS, TP)])
        self.data = _group_of(rank, [[r, r + TP] for r in (0, 1, 4, 5)])


def _group_of(rank: int, groups: list[list[int]]) -> dist.ProcessGroup:
    """Everybody takes part in making each group."""
    made: list[dist.ProcessGroup] = [dist.new_group(ranks) for ranks in groups]
    return next(group for group, ranks in zip(made, groups, strict=True) if rank in ranks)


class Stage(nn.Module):
    """This rank's half of one stage's perceptron."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        torch.manual_seed(1 + place.tp + TP * place.pp)  # alike in all replicas, and only there
        self.up = nn.Linear(WIDTH, INNER // TP)
        self.down = nn.Linear(INNER // TP, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


def numbers(step: int, dp: int) -> Tensor:
    """The batch and the target of one replica's step."""
    return torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(step * DP + dp))


def one_step(place: Place, stage: Stage, given: Tensor) -> None:
    """Forward and backward through both stages; leaves averaged gradients."""
    batch, target = given
    x = batch.clone()
    if place.pp > 0:
        dist.recv(x, place.below)
    x.requires_grad_()
    half = stage(x)
    whole = half.detach().clone()
    dist.all_reduce(whole, group=place.tensor)
    gradient = torch.empty_like(whole)
    if place.pp < PP - 1:
        dist.send(whole, place.above)
        dist.recv(gradient, place.above)
    else:
        gradient = (whole - target) / ROWS
    half.backward(gradient)
    if place.pp > 0:
        assert x.grad is not None
        dist.all_reduce(x.grad, group=place.tensor)
        dist.send(x.grad, place.below)
    for parameter in stage.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=place.data)
        parameter.grad /= DP


def digest(stage: Stage, optimizer: torch.optim.Optimizer) -> str:
    total = hashlib.sha256()
    for parameter in stage.parameters():
        moments = optimizer.state[parameter]
        for tensor in (parameter, moments["exp_avg"], moments["exp_avg_sq"]):
            total.update(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
    return total.hexdigest()


def log_of(log: Path, rank: int) -> Path:
    return log.with_name(f"{log.name}-{rank}") if rank else log


def train(log: Path, stop: Path | None, steps: int | None, pause_s: float = STEP_S) -> None:
    """The loop, within a process group. Outside everstep it begins at step 0 and nothing is saved.

    It ends after so many steps, or when there is a file at `stop`.
    """
    place = Place()
    stage = Stage(place)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    run = everstep.attach()
    ckpt = run.checkpoint({"model": stage, "optimizer": optimizer})
    with log_of(log, dist.get_rank()).open("a", buffering=1) as lines:
        for step in run.steps(start=ckpt.restore(), stop=steps):
            optimizer.zero_grad()
            one_step(place, stage, numbers(step, place.dp))
            optimizer.step()
            lines.write(f"{step} {digest(stage, optimizer)}\n")
            ckpt.save(step)
            asked = torch.tensor(stop is not None and stop.exists(), dtype=torch.float32)
            dist.all_reduce(asked)
            if asked.item() > 0:
                break
            time.sleep(pause_s)


def undisturbed(log: Path, rank: int, steps: int) -> None:
    """The same in a process of its own that everstep knows nothing of."""
    torch.set_num_threads(1)
    store = f"file://{log}-store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    train(log, None, steps, pause_s=0.0)
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--losses", type=Path, required=True)
    parser.add_argument("--stop", type=Path, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train(args.losses, args.stop, None)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
