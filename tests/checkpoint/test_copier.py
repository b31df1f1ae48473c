"""The copy thread by itself: its end holds nobody up, and what it commits has its digest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from everstep.checkpoint import slots
from everstep.checkpoint.copier import Copier, CpuTransfer, Job
from everstep.checkpoint.digest import check_digest
from everstep.checkpoint.format import Expected
from everstep.checkpoint.need import Need
from everstep.checkpoint.slots import ShardWriter, SharedMemoryTooSmall
from everstep.model import Rank, Step
from tests.checkpoint.objects import Box, snapshot_of
from tests.checkpoint.plain import writer


class Outcomes:
    """Records what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def refused(self, step: Step, error: SharedMemoryTooSmall) -> None:
        self.told.append(f"refused {step}: {error}")

    def reserved(self, need: Need) -> None:
        """Told once, and no matter here."""

    def torn(self, step: Step, entry: str) -> None:
        self.told.append(f"torn {step} {entry}")

    def failed(self, step: Step, error: Exception) -> None:
        self.told.append(f"failed {step} {error}")


def job() -> Job:
    return Job(snapshot_of({"box": Box(torch.ones(1000))}), CpuTransfer())


@pytest.mark.timeout(30)
def test_a_save_that_comes_after_the_thread_ended_is_over_at_once() -> None:
    def no_memory() -> ShardWriter:
        raise OSError("no memory")

    outcomes = Outcomes()
    copier = Copier(no_memory, outcomes)
    copier.start()
    copier.stop()
    copier.submit(job())
    copier.hold()
    copier.settle()
    assert copier.flush(timeout_s=10)
    assert outcomes.told == ["failed -1 no memory"]
    assert copier.saved == -1


def test_whatever_counts_as_a_copy_has_its_digest(shm: Path) -> None:
    """Also when the next save waits already."""
    outcomes = Outcomes()
    copier = Copier(lambda: writer(shm), outcomes)
    copier._queue.put(None)  # a save is waiting
    copier._save(job(), writer(shm))
    assert copier.saved == 5
    check_digest(slots.find(shm, Expected(step=Step(5), rank=Rank(0))))
    assert outcomes.told == []
