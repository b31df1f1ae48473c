"""The GPT example under each layout: killed in the middle, it computes what it would have."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from everstep.checkpoint import slots
from everstep.model import Generation, JobId, MachineId, Rank, Step, Term
from everstep.trainer.context import VARIABLE, AttachContext
from tests.checkpoint.ranks import Ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt"
TINY = ("--steps", "8", "--layers", "1", "--width", "32", "--seq", "8", "--batch", "1")
RANKS = 4
KILLED_IN = 5
pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    forked = Ranks()
    yield forked
    forked.close()


@pytest.fixture
def shm() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="everstep-test-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


def train(layout: str, digest: str, shm: str, restore: int, killed_in: int) -> None:
    """The script's own loop, on a rank that everstep started (or outside it, without `shm`)."""
    sys.path.insert(0, str(EXAMPLE))
    script: Any = importlib.import_module("train")
    data: Any = importlib.import_module("data")
    script.start_process_group = lambda: (dist.get_rank(), torch.device("cpu"))
    hand_out = data.Batches.next

    def dying(batches: Any) -> Any:
        if batches.position == killed_in:
            os.kill(os.getpid(), signal.SIGKILL)
        return hand_out(batches)

    data.Batches.next = dying
    if shm:
        os.environ[VARIABLE] = msgspec.json.encode(context(shm, restore)).decode()
        os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)
    args = script.parse([*TINY, "--parallel", layout, "--digest", digest])
    script.train(args, None)


def context(shm: str, restore: int) -> AttachContext:
    return AttachContext(
        job=JobId("job"),
        machine=MachineId("machine"),
        term=Term(1),
        generation=Generation(1 if restore < 0 else 2),
        rank=Rank(dist.get_rank()),
        local_rank=dist.get_rank(),
        world_size=RANKS,
        shm=shm,
        notice_socket="",
        restore=Step(restore),
        restore_generation=Generation(1),
        checkpoint_dir="",
    )


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "fsdp-tp"])
def test_a_killed_run_ends_with_the_bits_of_an_undisturbed_one(
    ranks: Ranks, shm: Path, tmp_path: Path, layout: str
) -> None:
    ranks.run(RANKS, train, layout, tmp_path / "undisturbed", "", -1, -1)
    killed = ranks.failures(RANKS, train, layout, tmp_path / "killed", shm, -1, KILLED_IN)
    assert len(killed) == RANKS
    held = [slots.inventory(shm, [Rank(rank)]) for rank in range(RANKS)]
    common = max(set.intersection(*({copy.step for copy in copies} for copies in held)))
    assert common in (KILLED_IN - 1, KILLED_IN - 2)
    ranks.run(RANKS, train, layout, tmp_path / "killed", shm, common, -1)
    for rank in ["", *(f"-{rank}" for rank in range(1, RANKS) if layout != "ddp")]:
        digests = [(tmp_path / f"{name}{rank}").read_text() for name in ("undisturbed", "killed")]
        assert digests[0] == digests[1]
