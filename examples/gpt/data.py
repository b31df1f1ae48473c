"""Real text on every machine: the source of Python's own standard library, as bytes.

train.py reads batches from here. Which bytes a batch holds depends on the seed, the rank and the
position alone, so a loader that is told its position goes on exactly where it was.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

TEXT_BYTES = 1_000_000
"""Of about 5 MB: reading them all at every start would take longer than the rest of a restart."""


def stdlib_text() -> Tensor:
    """The top-level modules of the standard library in the order of their names, the first 1 MB."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    return torch.frombuffer(text, dtype=torch.uint8)


class Batches:
    """An endless stream of random windows of the text, a different one for every rank."""

    def __init__(self, text: Tensor, *, batch: int, seq: int, rank: int, seed: int) -> None:
        self.position = 0
        """Batches handed out so far: all there is to save and restore."""
        self._text = text
        self._batch = batch
        self._window = torch.arange(seq + 1)
        self._rank = rank
        self._seed = seed

    def next(self) -> tuple[Tensor, Tensor]:
        """Inputs and, one byte further on, targets: two int64 tensors of [batch, seq]."""
        dice = torch.Generator().manual_seed(
            (self._seed * 1_000_003 + self._rank) * 1_000_000_007 + self.position
        )
        last = len(self._text) - len(self._window)
        starts = torch.randint(last, (self._batch, 1), generator=dice)
        windows = self._text[starts + self._window].long()
        self.position += 1
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]
