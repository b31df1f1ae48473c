"""The training script of test_survival.py: small, quick and exact.

Rank 0 writes a line per finished step: its loss and a digest of all parameters, bit for bit. It
trains until somebody puts a file where --stop says; then all ranks end after the same step. With
--ddp the model is wrapped, so that everstep knows all ranks to be replicas.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- everyone's name for it
from torch.nn.parallel import DistributedDataParallel

import everstep

SEEN = 8
STEP_S = 0.004
"""Time in which a step does nothing: leaves processor time to what is under test."""


def batch(source: Tensor, step: int, rank: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(step * 1_000_003 + rank)
    starts = torch.randint(len(source) - SEEN - 1, (16, 1), generator=dice)
    windows = source[starts + torch.arange(SEEN + 1)]
    return windows[:, :-1], windows[:, -1]


def digest(model: nn.Module) -> str:
    total = hashlib.sha256()
    for parameter in model.parameters():
        total.update(ctypes.string_at(parameter.data_ptr(), parameter.nbytes))
    return total.hexdigest()


def replicated(model: nn.Module) -> nn.Module:
    """Under DDP, with the gradient buckets that every later step will have."""
    wrapped = DistributedDataParallel(model)
    wrapped(torch.zeros(1, SEEN, dtype=torch.long)).sum().backward()
    wrapped.zero_grad()
    return wrapped


def average(model: nn.Module, stop: float) -> bool:
    """Average all gradients in one call; whether rank 0 said stop."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([*(gradient.flatten() for gradient in gradients), torch.tensor([stop])])
    dist.all_reduce(flat)
    at = 0
    for gradient in gradients:
        size = gradient.numel()
        gradient.copy_(flat[at : at + size].view_as(gradient) / dist.get_world_size())
        at += size
    return flat[-1].item() > 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--losses", type=Path, required=True)
    parser.add_argument("--stop", type=Path, required=True)
    parser.add_argument("--ddp", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    model: nn.Module = nn.Sequential(
        nn.Embedding(256, 8), nn.Flatten(), nn.Linear(8 * SEEN, 32), nn.Tanh(), nn.Linear(32, 256)
    )
    if args.ddp:
        model = replicated(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = bytearray(Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes())
    source = torch.frombuffer(text, dtype=torch.uint8).long()

    run = everstep.attach()
    ckpt = run.checkpoint({"model": model, "optimizer": optimizer})
    with args.losses.open("a", buffering=1) as log:
        for step in run.steps(start=ckpt.restore()):
            inputs, targets = batch(source, step, rank)
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            stop = average(model, float(rank == 0 and args.stop.exists()))
            optimizer.step()
            if rank == 0:
                log.write(f"{step} {float(loss).hex()} {digest(model)}\n")
            run.report(loss=loss)
            ckpt.save(step)
            if stop:
                break
            time.sleep(STEP_S)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
