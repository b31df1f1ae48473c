"""A small GPT over bytes: what train.py trains. Nothing in it knows of everstep."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- everyone's name for it

BYTES = 256
HEAD_WIDTH = 16


class Block(nn.Module):
    """One layer: causal self-attention, then a two-layer perceptron, both on a residual path."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        # Head by head, so that tensor parallelism can cut between heads: -1 are those of this rank.
        qkv = self.qkv(self.norm_attention(x)).view(batch, seq, -1, 3, HEAD_WIDTH)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, seq, -1))
        change: Tensor = self.down(F.gelu(self.up(self.norm_mlp(x))))
        return x + change


class GPT(nn.Module):
    """Predicts the next byte; forward returns the mean loss over all positions."""

    def __init__(self, *, layers: int, width: int, seq: int) -> None:
        super().__init__()
        if width % HEAD_WIDTH:
            raise ValueError(f"width {width} is no multiple of the head width, {HEAD_WIDTH}")
        self.byte = nn.Embedding(BYTES, width)
        self.place = nn.Embedding(seq, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.apply(_start_small)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.blocks(self.byte(inputs) + self.place(places))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _start_small(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
