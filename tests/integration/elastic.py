"""The training script of test_elastic.py: data parallel, with the same global batch at any size.

Every rank writes a line when it has restored and one per finished step: what it computed and a
digest of all state, bit for bit. It trains until somebody puts a file where --stop says.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import everstep
from everstep.checkpoint.layout import tensors_in

STEP_S = 0.02
"""Time in which a step does nothing: leaves processor time to what is under test."""
WIDTH = 24


class Seen:
    """What differs between replicas: a place in the data."""

    def __init__(self, rank: int) -> None:
        self.parts = 1000 * rank

    def state_dict(self) -> dict[str, Any]:
        return {"parts": self.parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.parts = state["parts"]


def batch(step: int, part: int) -> Tensor:
    dice = torch.Generator().manual_seed(step * 1_000_003 + part)
    return torch.randn(8, WIDTH, generator=dice)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all parameters and of the optimizer's state."""
    total = hashlib.sha256()
    for tensor in (*model.parameters(), *tensors_in(optimizer.state_dict()["state"])):
        flat = tensor.detach().contiguous()
        total.update(ctypes.string_at(flat.data_ptr(), flat.nbytes))
    return total.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--stop", type=Path, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(WIDTH, 48), nn.Tanh(), nn.Linear(48, WIDTH))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    run = everstep.attach()
    here, seen = run.layout, Seen(rank)
    ckpt = run.checkpoint({"model": model, "optimizer": optimizer, "seen": seen})
    start = ckpt.restore()
    began = os.environ["TORCHELASTIC_RESTART_COUNT"]
    with (args.log / f"rank-{rank}").open("a", buffering=1) as log:

        def note(what: str, step: int) -> None:
            shares = ",".join(map(str, here.shares))
            numbers = f"{began} {what} {step} {here.dp} {shares} {seen.parts}"
            log.write(f"{numbers} {digest(model, optimizer)}\n")

        note("restored", start - 1)
        for step in run.steps(start=start):
            optimizer.zero_grad()
            for part, weight in here.micro_steps:
                loss = (model(batch(step, part)) - batch(step, part)).square().mean()
                (loss * weight).backward()
            seen.parts += len(here.shares)
            optimizer.step()
            ckpt.save(step)
            note("did", step)
            stop = torch.tensor([float(rank == 0 and args.stop.exists())])
            dist.all_reduce(stop)
            if stop.item():
                break
            time.sleep(STEP_S)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
