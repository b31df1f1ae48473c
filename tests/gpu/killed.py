"""Checks of kill -9 on a GPU: while it trains and copies, while it restores, and what is left.

Victims are forked from this process, which has imported torch and never touches CUDA: so are ranks.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import torch

from everstep.agent.warm import warm_up
from everstep.checkpoint import slots
from everstep.model import Rank
from tests.checkpoint.lockstep import Counters, fork
from tests.gpu.answers import Answer
from tests.gpu.saving import run_on, shared_memory, synchronize

ROUNDS = 5
GONE_WITHIN_S = 10.0
WITHIN_S = 40.0


class Victims:
    """One process after the other, each from where the one before was killed."""

    def __init__(self, device: str, shm: Path) -> None:
        self._device = device
        self._shm = shm
        self._log = shm / "log"
        self._log.touch()
        self._pid = 0
        self.generation = 0
        self.restored = (-1, 0)

    def start(self) -> None:
        self.generation += 1
        self._pid = fork(partial(train, self._device, self._shm, self.restored, self.generation))

    def lines(self, mark: str = "") -> list[str]:
        return [line for line in self._log.read_text().split("\n")[:-1] if line.startswith(mark)]

    def wait(self, mark: str, count: int) -> None:
        """Until there are so many more lines that begin with this."""
        deadline = time.monotonic() + WITHIN_S
        goal = len(self.lines(mark)) + count
        while len(self.lines(mark)) < goal:
            assert os.waitpid(self._pid, os.WNOHANG) == (0, 0), "it ended by itself"
            assert time.monotonic() < deadline, f"{mark!r} was waited for in vain"
            time.sleep(0.002)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        copies = slots.inventory(self._shm, [Rank(0)])
        if copies:
            newest = max(copies, key=lambda copy: copy.step)
            self.restored = (newest.step, newest.generation)


def kills(device: str) -> Answer:
    rng = random.Random(6)
    warm_up([])
    torch.set_num_threads(1)
    before = used_bytes(device)
    with shared_memory() as shm:
        victims = Victims(device, shm)
        for _ in range(ROUNDS):
            victims.start()
            victims.wait("step", rng.randint(3, 30))
            time.sleep(rng.random() * 0.02)
            victims.kill()
            finished = int(victims.lines("step")[-1].split()[1])
            assert victims.restored[0] in (finished, finished - 1), (victims.restored, finished)
            victims.start()
            victims.wait("restoring", 1)
            time.sleep(rng.random() * 0.05)
            victims.kill()
        victims.start()
        victims.wait("step", 20)
        victims.kill()
        seen: dict[str, str] = {}
        again = 0
        for line in victims.lines("step"):
            _, step, digest = line.split()
            again += step in seen
            assert seen.setdefault(step, digest) == digest, f"step {step} came out otherwise"
        returned_s = wait_for_memory(device, before)
    figures = {
        "kills": 2 * ROUNDS + 1,
        "steps": len(seen),
        "steps_done_again": again,
        "memory_returned_after_s": returned_s,
    }
    return Answer(f"{2 * ROUNDS + 1} kills, {again} steps done again with the same bits", figures)


def used_bytes(device: str) -> int:
    """Of the whole device, other processes' too. Asked by a process that is gone afterwards."""
    if device == "cpu":
        return 0
    used = Counters(1, -1)

    def ask() -> None:
        free, total = torch.cuda.mem_get_info()
        used.finish(0, int(total - free))

    os.waitpid(fork(ask), 0)
    assert used.all()[0] >= 0, "a process that asks for the free memory failed"
    return used.all()[0]


def wait_for_memory(device: str, before: int) -> float:
    began = time.monotonic()
    while used_bytes(device) > before + (64 << 20):
        waited = time.monotonic() - began
        assert waited < GONE_WITHIN_S, f"{used_bytes(device) - before} bytes are not returned"
        time.sleep(0.05)
    return time.monotonic() - began


def train(device: str, shm: Path, restored: tuple[int, int], generation: int) -> None:
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 1024), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(1024, 8)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fd = os.open(shm / "log", os.O_WRONLY | os.O_APPEND)
    run = run_on(shm, generation, *restored)
    checkpoint = run.checkpoint({"model": model, "optimizer": optimizer})
    os.write(fd, b"restoring\n")
    for step in run.steps(start=checkpoint.restore(), stop=100_000):
        batch = torch.randn(64, 256, device=device)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        synchronize(device)
        os.write(fd, f"step {step} {digest(model)}\n".encode())
        checkpoint.save(step)


def digest(model: torch.nn.Module) -> str:
    total = hashlib.sha256()
    for parameter in model.parameters():
        mine = parameter.detach().cpu()
        total.update(ctypes.string_at(mine.data_ptr(), mine.nbytes))
    return total.hexdigest()
