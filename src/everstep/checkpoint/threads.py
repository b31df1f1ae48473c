"""Several threads for bulk work that holds no GIL, while a rank restores and does nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

THREADS_MAX = 4
"""More would not read memory faster, and all ranks of a machine restore at the same time."""


def usable_threads() -> int:
    """How many this process may keep busy: one where torch shares out each call by itself."""
    if torch.get_num_threads() > 1:
        return 1
    return min(THREADS_MAX, len(os.sched_getaffinity(0)))


def do_all(works: Iterable[Callable[[], Any]], threads: int) -> None:
    """Do all of them, in no order. Raises what the first one that failed raises."""
    if threads == 1:
        for work in works:
            work()
        return
    with ThreadPoolExecutor(threads) as pool:
        # In a forked process torch makes its own pool anew at the first call from a new thread, and
        # a second thread that calls meanwhile fails ("Invalid thread pool").
        pool.submit(torch.get_num_threads).result()
        for done in [pool.submit(work) for work in works]:
            done.result()
