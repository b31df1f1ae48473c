"""A small training job that uses everything whose state must survive: dropout, batch norm, Adam,
a schedule, shuffled data, Python's, numpy's and torch's random numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from everstep.trainer.run import Run

torch.set_num_threads(1)
"""Forked ranks must not inherit a pool of threads, as those of the launcher do not."""


class Loader:
    """A stateful data loader: shuffled once per epoch, with a position in it."""

    def __init__(self) -> None:
        self._order: list[int] = []
        self._position = 0

    def next_batch(self) -> torch.Tensor:
        if self._position == len(self._order):
            self._order = torch.randperm(7).tolist()
            self._position = 0
        value = self._order[self._position]
        self._position += 1
        return torch.full((4, 6), float(value)) + torch.randn(4, 6)

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._order, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order, self._position = state["order"], state["position"]


class Training:
    """Model, optimizer, schedule and data, all from one seed."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        random.seed(2)
        np.random.seed(3)  # noqa: NPY002 -- the generator that scripts share
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(16, 1),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.data = Loader()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "data": self.data,
        }

    def forward_backward(self) -> torch.Tensor:
        shared = np.random.rand()  # noqa: NPY002 -- the generator that scripts share
        noise = random.random() + float(shared)
        output: torch.Tensor = self.model(self.data.next_batch())
        loss = (output - noise).square().mean()
        loss.backward()
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()


def train(
    run: Run,
    stop: int,
    training: Training | None = None,
    finished: Callable[[str], object] = len,
) -> list[str]:
    """A plain loop with everstep's lines in it; the loss of every step that ran, exactly.

    `finished` is told each of them right after the optimizer's update.
    """
    work = training or Training()
    losses = []
    checkpoint = run.checkpoint(work.state())
    for step in run.steps(start=checkpoint.restore(), stop=stop):
        loss = work.forward_backward()
        work.update()
        losses.append(line(step, loss))
        finished(losses[-1])
        run.report(loss=loss)
        checkpoint.save(step)
    return losses


def line(step: int, loss: torch.Tensor) -> str:
    return f"{step} {float(loss.detach()).hex()}"


def weights(training: Training) -> list[list[str]]:
    """All parameters and buffers, exactly."""
    state = training.model.state_dict().values()
    return [[float(x).hex() for x in tensor.reshape(-1)] for tensor in state]
