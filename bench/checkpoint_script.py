"""The training script that bench/checkpoint.py runs under everstep and under torchrun.

It trains a GPT, each rank one of its own, and the ranks wait for each other in every step. What it
does is ordered from outside (orders.py), turn by turn: how much work a step is, and how it is
saved. The module `model` comes from examples/gpt by PYTHONPATH, as a user's own modules do.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_savers import RIVALS, Dcp, EveryStep, Nothing, Saver, State
from marks import Marks
from model import BYTES, GPT
from orders import Copied, Done, Order, Restored, Took, read_orders, tell

import everstep

SEQ = 16
UNIT = 512
"""Extra work comes in products of square matrices of this size: they stay in the cache."""
LOOK_EVERY_S = 0.01
COPY_INTO_BYTES = 128 << 20
"""Plain copies go round in a buffer of this size, far more than any cache holds."""


class Training:
    """One rank's model, and what it does besides."""

    def __init__(self, layers: int, width: int) -> None:
        torch.manual_seed(dist.get_rank())
        self.model = GPT(layers=layers, width=width, seq=SEQ)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._tokens = torch.randint(BYTES, (1, SEQ + 1))
        self._work = torch.rand(UNIT, UNIT)
        self._product = torch.empty(UNIT, UNIT)

    def compute(self, units: int) -> torch.Tensor:
        """Forward, backward, and more work that stands for a larger model."""
        loss = self.model(self._tokens[:, :-1], self._tokens[:, 1:])
        self.optimizer.zero_grad(set_to_none=False)
        loss.backward()
        for _ in range(units):
            torch.mm(self._work, self._work, out=self._product)
        lost: torch.Tensor = loss.detach()
        return lost


class Hooks:
    """Times what happens before the optimizer's step: the first of its hooks, and the last."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.saver: Saver = Nothing()
        self.wait_s = 0.0
        self._begun = 0.0
        optimizer.register_step_pre_hook(self._enter)

    def close(self) -> None:
        """All other hooks are registered."""
        self._optimizer.register_step_pre_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        self._begun = time.monotonic()
        self.saver.before_optimizer()

    def _leave(self, *_: Any) -> None:
        self.wait_s = time.monotonic() - self._begun


class Rank:
    """Carries out orders."""

    def __init__(self, args: argparse.Namespace, marks: Marks) -> None:
        self._orders: Path = args.orders
        self._told: Path = args.told / f"rank-{dist.get_rank()}"
        self._marks = marks
        self._training = training = Training(args.layers, args.width)
        self._state = State(training.model, training.optimizer, args.memory)
        self._hooks = Hooks(training.optimizer)
        self._run = everstep.attach()
        ckpt = self._run.checkpoint({"model": training.model, "optimizer": training.optimizer})
        self._hooks.close()
        begun = time.monotonic()
        start = ckpt.restore()
        if start:
            tell(self._told, Restored(step=start - 1, took_s=time.monotonic() - begun))
        marks.write("restored", start)
        self._savers: dict[str, Saver] = {
            "none": Nothing(),
            "everstep": EveryStep(self._run, ckpt, self._run.steps(start=start)),
        }

    def carry_out(self) -> None:
        """All orders; after a restart from the newest one, which was the one under way."""
        for number, order in self._coming():
            error = ""
            if order.saver == "copies":
                self._copies()
            elif order.saver == "dcp_load":
                self._load()
            else:
                error = self._turn(number, order)
            dist.barrier()
            tell(self._told, Done(order=number, memory_bytes=_memory_bytes(), error=error))

    def _coming(self) -> Iterator[tuple[int, Order]]:
        number = max(len(read_orders(self._orders)) - 1, 0)
        while True:
            box: list[tuple[int, Order] | None] = [None]
            if dist.get_rank() == 0:
                while len(orders := read_orders(self._orders)) <= number:
                    time.sleep(LOOK_EVERY_S)
                box = [(number, orders[number])]
            dist.broadcast_object_list(box, src=0)
            assert box[0] is not None
            yield box[0]
            number += 1

    def _turn(self, number: int, order: Order) -> str:
        """The error if this way of saving does not work here."""
        try:
            if order.saver not in self._savers:
                self._savers[order.saver] = RIVALS[order.saver](self._state)
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        saver = self._hooks.saver = self._savers[order.saver]
        done, last = 0, False
        while not last:
            last = self._step(number, order, last=done + 1 == order.steps)
            done += 1
        saver.settle()
        self._hooks.saver = self._savers["none"]
        return ""

    def _step(self, number: int, order: Order, *, last: bool) -> bool:
        """Whether it was the last one, on all ranks alike."""
        saver = self._hooks.saver
        wall, begun = time.time(), time.monotonic()
        step = saver.begin()
        loss = self._training.compute(order.units)
        computed = time.monotonic()
        if not order.steps and dist.get_rank() == 0:
            last = len(read_orders(self._orders)) > number + 1
        shared = torch.stack((loss, torch.tensor(float(last))))
        dist.all_reduce(shared)
        self._training.optimizer.step()
        stepped = time.monotonic()
        saver.save(step)
        ended = time.monotonic()
        if isinstance(saver, EveryStep):
            self._run.report(loss=loss)
            self._marks.write("step", step)
        took = Took(
            order=number,
            begun=wall,
            compute_s=computed - begun,
            step_s=ended - begun,
            save_s=ended - stepped - saver.queued_s,
            wait_s=self._hooks.wait_s,
            queued_s=saver.queued_s,
            memory_bytes=_memory_bytes(),
        )
        tell(self._told, took)
        return bool(shared[1] > 0)

    def _copies(self) -> None:
        tensors = self._state.tensors()
        largest = max(tensor.nbytes for tensor in tensors)
        into = torch.zeros(max(COPY_INTO_BYTES, largest), dtype=torch.uint8)
        total, at, targets = 0, 0, []
        for tensor in tensors:
            at = 0 if at + tensor.nbytes > into.nbytes else at
            targets.append(into[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            at, total = at + (tensor.nbytes + 63) // 64 * 64, total + tensor.nbytes
        dist.barrier()
        begun = time.monotonic()
        torch._foreach_copy_(targets, tensors)
        touched = time.monotonic()
        dist.barrier()
        again = time.monotonic()
        kept = [tensor.clone() for tensor in tensors]
        fresh_s = time.monotonic() - again
        del kept
        told = Copied(total_bytes=total, touched_s=touched - begun, fresh_s=fresh_s)
        tell(self._told, told)

    def _load(self) -> None:
        saver = self._savers["dcp"]
        assert isinstance(saver, Dcp)
        tell(self._told, Restored(step=0, took_s=saver.load_s()))


def _memory_bytes() -> int:
    fields = Path("/proc/self/status").read_text().splitlines()
    sizes = [line.split()[1] for line in fields if line.startswith(("RssAnon:", "RssShmem:"))]
    return sum(int(size) for size in sizes) << 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--marks", required=True)
    parser.add_argument("--orders", type=Path, required=True)
    parser.add_argument("--told", type=Path, required=True)
    parser.add_argument("--memory", type=Path, required=True, help="a directory in memory")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    args = parser.parse_args()
    marks = Marks(args.marks)
    marks.write("script")
    dist.init_process_group("gloo")
    Rank(args, marks).carry_out()


if __name__ == "__main__":
    main()
