"""The training script that bench/recovery.py runs: a small network under DDP, saved every step.

It is short, so that what is measured is the way to its first step and not the step. recovery.py
copies it, with marks.py, into a directory of its own for each code version and changes EDITION;
each rank writes down which edition it runs and when it reached which point.
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
from marks import Marks

EDITION = 0
WIDTH = 256


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--marks", required=True)
    marks = Marks(parser.parse_args().marks)
    marks.write("script", at_ns=BEGUN_NS)
    marks.write(f"edition-{EDITION}")
    marks.write("imports")

    dist.init_process_group("gloo")
    marks.write("rendezvous")

    torch.manual_seed(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs = torch.randn(64, WIDTH)
    run = everstep.attach()
    ckpt = run.checkpoint({"model": model, "optimizer": optimizer})
    start = ckpt.restore()
    marks.write("restored", start)

    for step in run.steps(start=start):
        loss = (parallel(inputs) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.report(loss=loss)
        ckpt.save(step)
        marks.write("step", step)


if __name__ == "__main__":
    main()
