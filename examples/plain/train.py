"""A training script that knows nothing of everstep: it restarts from checkpoints of its own.

    everstep run --local-machines 2 --nproc-per-node 2 examples/plain/train.py --checkpoint FILE

everstep starts it, watches it and restarts it all the same; what is lost is what this script has
not saved. It predicts the next byte of Python's own source from the eight before it.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- everyone's name for it

SEEN = 8
BATCH = 64


def text() -> Tensor:
    source = Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()
    return torch.frombuffer(bytearray(source), dtype=torch.uint8).long()


def batch(source: Tensor, step: int, rank: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(step * 1_000_003 + rank)
    starts = torch.randint(len(source) - SEEN - 1, (BATCH, 1), generator=dice)
    windows = source[starts + torch.arange(SEEN + 1)]
    return windows[:, :-1], windows[:, -1]


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """All or nothing: a kill in the middle leaves the former checkpoint as it was."""
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns the first step that is still to do."""
    if not path.exists():
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"]) + 1


def main() -> None:
    parser = argparse.ArgumentParser(description="Train without everstep in the script.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    args = parser.parse_args()

    rank, ranks = 0, 1
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * SEEN, 128), nn.ReLU(),
        nn.Linear(128, 256),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    source = text()

    start = load(args.checkpoint, model, optimizer)
    print(f"rank {rank} starts at step {start}", flush=True)
    for step in range(start, args.steps):
        inputs, targets = batch(source, step, rank)
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        if ranks > 1:
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad.div_(ranks))
        optimizer.step()
        if rank == 0 and ((step + 1) % args.every == 0 or step + 1 == args.steps):
            save(args.checkpoint, step, model, optimizer)
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
