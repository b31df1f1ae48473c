"""The training script that bench/hang.py runs under every launcher: a small GPT under DDP.

Every so many steps rank 0 evaluates alone while the others wait for it, as many scripts do: what
detects hangs must bear that. Each rank writes down when it reached which point.
"""

# ruff: noqa: E402, I001 -- the first mark comes before the imports that it measures

from __future__ import annotations

import time

BEGUN_NS = time.monotonic_ns()

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import everstep
from data import Batches, stdlib_text
from marks import Marks
from model import GPT

SEQ = 64
EVALUATE_EVERY = 150


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--marks", required=True)
    parser.add_argument("--timeout", type=float, help="of collectives; default: 30 minutes")
    parser.add_argument("--evaluate-s", type=float, default=0.0, help="how long rank 0 evaluates")
    parser.add_argument("--save", action="store_true", help="checkpoint every step")
    args = parser.parse_args()
    marks = Marks(args.marks)
    marks.write("script", at_ns=BEGUN_NS)

    limit = None if args.timeout is None else timedelta(seconds=args.timeout)
    dist.init_process_group("gloo", timeout=limit)
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = GPT(layers=2, width=64, seq=SEQ)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = Batches(stdlib_text(), batch=4, seq=SEQ, rank=rank, seed=1)
    run = everstep.attach()
    start = 0
    if args.save:
        ckpt = run.checkpoint({"model": model, "optimizer": optimizer, "data": batches})
        start = ckpt.restore()

    for step in run.steps(start=start):
        loss = parallel(*batches.next())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.report(loss=loss)
        if args.save:
            ckpt.save(step)
        marks.write("step", step)
        if rank == 0 and step % EVALUATE_EVERY == EVALUATE_EVERY - 1:
            evaluate(model, batches, args.evaluate_s)


@torch.no_grad()
def evaluate(model: GPT, batches: Batches, for_s: float) -> None:
    """Forward passes for so long."""
    end = time.monotonic() + for_s
    while time.monotonic() < end:
        model(*batches.next())


if __name__ == "__main__":
    main()
