"""A rank of four that are stuck as in Figure 7 of the ByteRobust paper, for aggregate.py.

Rank 0 waits in the gradients' reduction (what the healthy ranks do), 1 in a receive, 2 in a send, 3
in a gather of the last stage. Each has a worker of a data loader, rank 0 a thread of its own.

    python aggregate_script.py RANK STORE_FILE
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

RANKS = 4
LARGE = 1 << 22
"""Elements of a send that does not fit into the buffers of a socket."""


class Samples(Dataset[torch.Tensor]):
    """Ones."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(4)


def watch() -> None:
    """What a program does beside: it says nothing about the hang."""
    while True:
        time.sleep(0.05)


def sync_gradients(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(64), group=group)


def recv_forward() -> None:
    dist.recv(torch.ones(64), src=3, tag=7)


def send_forward() -> None:
    dist.send(torch.ones(LARGE), dst=0, tag=7)


def gather_logits(group: dist.ProcessGroup) -> None:
    dist.all_gather_into_tensor(torch.ones(128), torch.ones(64), group=group)


def step(rank: int, batches: Iterator[torch.Tensor], groups: list[dist.ProcessGroup]) -> None:
    """The one that never ends."""
    next(batches)
    if rank == 0:
        sync_gradients(groups[0])
    elif rank == 1:
        recv_forward()
    elif rank == 2:
        send_forward()
    else:
        gather_logits(groups[1])


def train(rank: int, store: str) -> None:
    """Join, start a loader, get stuck."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if rank == 0:
        threading.Thread(target=watch, daemon=True).start()
    batches = iter(DataLoader(Samples(), batch_size=4, num_workers=1))
    next(batches)
    dist.barrier()
    print("stuck", flush=True)
    step(rank, batches, groups)


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(int(sys.argv[1]), sys.argv[2])
