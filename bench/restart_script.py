"""The training script that bench/restart.py runs under every launcher: a small GPT under DDP.

It is the loop of examples/gpt/train.py with one thing more: every rank writes down when it reached
which point, by the monotonic clock that all processes of a host share. The modules `model` and
`data` come from examples/gpt by PYTHONPATH, as a user's own modules do.
"""

# ruff: noqa: E402, I001 -- the first mark comes before the imports that it measures

from __future__ import annotations

import time

BEGUN_NS = time.monotonic_ns()

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import everstep
from data import Batches, stdlib_text
from marks import Marks
from model import GPT

SEQ = 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--marks", required=True)
    parser.add_argument("--save", action="store_true", help="checkpoint every step")
    args = parser.parse_args()
    marks = Marks(args.marks)
    marks.write("script", at_ns=BEGUN_NS)
    marks.write("imports")

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    marks.write("rendezvous")

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
    marks.write("restored", start)

    for step in run.steps(start=start):
        loss = parallel(*batches.next())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.report(loss=loss)
        if args.save:
            ckpt.save(step)
        marks.write("step", step)


if __name__ == "__main__":
    main()
