"""Trains a byte-level GPT on the source text of Python's standard library, with DDP.

One script for three ways to run it:

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
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from data import Batches, stdlib_text
from model import GPT
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everstep  # everstep


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on Python's own source.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--seq", type=int, default=64, help="bytes per sequence")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--loss-log", type=Path, help="rank 0 appends 'STEP LOSS' (hex float)")
    parser.add_argument("--digest", type=Path, help="rank 0 writes the parameters' SHA-256 here")
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


def data_parallel(model: nn.Module, device: torch.device, seq: int) -> nn.Module:
    """Wrap the model in DDP, with the buckets that every later step will have.

    DDP lays its gradient buckets out anew after the first backward pass. In a restarted process
    that would be another step than in an undisturbed one, and with more than two ranks gloo then
    adds the same numbers in another order. One backward pass on nothing settles the layout.
    """
    wrapped = DistributedDataParallel(model)
    nothing = torch.zeros(1, seq, dtype=torch.long, device=device)
    wrapped(nothing, nothing).backward()
    wrapped.zero_grad()
    return wrapped


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Ten steps of warm-up, then down in a straight line to a tenth."""
    done = step / max(1, args.steps)
    rate: float = args.lr * min(1.0, (step + 1) / 10) * (1.0 - 0.9 * done)
    return rate


def digest(model: nn.Module) -> str:
    """SHA-256 of all parameters, bit for bit."""
    total = hashlib.sha256()
    for parameter in model.parameters():
        tensor = parameter.detach().cpu().contiguous()
        total.update(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
    return total.hexdigest()


def train(args: argparse.Namespace, log: TextIO | None) -> None:
    rank, device = start_process_group()
    torch.manual_seed(args.seed)
    model = GPT(layers=args.layers, width=args.width, seq=args.seq).to(device)
    parallel = data_parallel(model, device, args.seq) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    batches = Batches(stdlib_text(), batch=args.batch, seq=args.seq, rank=rank, seed=args.seed)

    run = everstep.attach()  # everstep
    ckpt = run.checkpoint({"model": model, "optimizer": optimizer, "data": batches})  # everstep
    for step in run.steps(start=ckpt.restore(), stop=args.steps):  # was: in range(args.steps)
        inputs, targets = (tensor.to(device) for tensor in batches.next())
        loss = parallel(inputs, targets)
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

    if rank == 0 and args.digest:
        args.digest.write_text(digest(model) + "\n")
    if dist.is_initialized():
        dist.barrier()  # nobody leaves while gloo's threads still hold a gradient bucket
        dist.destroy_process_group()


def main() -> None:
    args = parse()
    if args.loss_log:
        with args.loss_log.open("a", buffering=1) as log:
            train(args, log)
    else:
        train(args, None)


if __name__ == "__main__":
    main()
