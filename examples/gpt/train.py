"""Trains a byte-level GPT on the source text of Python's standard library.

One script for three ways to run it, and with --parallel for three ways to spread the model:

    python examples/gpt/train.py
    torchrun --nproc-per-node 4 examples/gpt/train.py
    everstep run --local-machines 4 --nproc-per-node 2 examples/gpt/train.py

The five lines marked `# everstep` are all that it takes to save every step and to go on from the
newest one after a crash; outside everstep they do nothing. The training is deterministic: the same
flags and the same number of ranks give the same bits, disturbed or not.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import time
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from data import Batches, stdlib_text
from layouts import LAYOUTS, spread
from model import GPT
from torch import nn

import everstep  # everstep


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on Python's own source.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--seq", type=int, default=64, help="bytes per sequence")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--parallel", choices=LAYOUTS, default="ddp", help="see layouts.py")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--loss-log", type=Path, help="rank 0 appends 'STEP LOSS' (hex float)")
    parser.add_argument("--digest", type=Path, help="for the parameters' SHA-256")
    return parser.parse_args(argv)


def start_process_group() -> tuple[int, torch.device]:
    """Join the other ranks, if the launcher says that there are any. Returns rank and device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "WORLD_SIZE" not in os.environ:
        return 0, device
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return dist.get_rank(), device


def end_process_group() -> None:
    """Leave together, when gloo's threads have let go of the last gradients.

    To free them, such a thread needs Python's lock; the end of the process group holds that lock
    and waits for the thread. On a busy machine one rank in some hundred hung there for ever.
    """
    dist.barrier()
    time.sleep(0.1)
    dist.destroy_process_group()


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Ten steps of warm-up, then down in a straight line to a tenth."""
    done = step / max(1, args.steps)
    rate: float = args.lr * min(1.0, (step + 1) / 10) * (1.0 - 0.9 * done)
    return rate


def digest(model: nn.Module) -> str:
    """SHA-256 of all parameters that this rank holds, bit for bit."""
    total = hashlib.sha256()
    for parameter in model.parameters():
        mine: torch.Tensor = parameter.detach()
        if hasattr(mine, "to_local"):
            mine = mine.to_local()
        tensor = mine.cpu().contiguous()
        total.update(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
    return total.hexdigest()


def train(args: argparse.Namespace, log: TextIO | None) -> None:
    rank, device = start_process_group()
    torch.manual_seed(args.seed)
    model = GPT(layers=args.layers, width=args.width, seq=args.seq).to(device)
    forward, replica, fused = spread(model, args.parallel, device, args.seq)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=fused, foreach=False)
    batches = Batches(stdlib_text(), batch=args.batch, seq=args.seq, rank=replica, seed=args.seed)

    run = everstep.attach()  # everstep
    ckpt = run.checkpoint({"model": model, "optimizer": optimizer, "data": batches})  # everstep
    for step in run.steps(start=ckpt.restore(), stop=args.steps):  # was: in range(args.steps)
        inputs, targets = (tensor.to(device) for tensor in batches.next())
        loss = forward(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        optimizer.step()
        value = loss.item()
        if rank == 0 and log:
            log.write(f"{step} {value.hex()}\n")
        if rank == 0 and (step % 20 == 0 or step == args.steps - 1):
            print(f"step {step}: loss {value:.4f}", flush=True)
        run.report(loss=value, tokens=inputs.numel())  # everstep
        ckpt.save(step)  # everstep

    if args.digest and (rank == 0 or args.parallel != "ddp"):
        path = args.digest.with_name(args.digest.name + (f"-{rank}" if rank else ""))
        path.write_text(digest(model) + "\n")
    if dist.is_initialized():
        end_process_group()


def main() -> None:
    args = parse()
    if args.loss_log:
        with args.loss_log.open("a", buffering=1) as log:
            train(args, log)
    else:
        train(args, None)


if __name__ == "__main__":
    main()
