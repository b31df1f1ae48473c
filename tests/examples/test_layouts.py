"""The GPT example under each layout: killed in the middle, it computes what it would have."""

from __future__ import annotations

import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from everstep.checkpoint import slots
from everstep.checkpoint.kept import Kept
from everstep.cluster.cleanup import job_scope
from everstep.commands import offline
from everstep.commands.jobs import result_of, spec_of
from everstep.core.state import Phase
from everstep.model import (
    NO_STEP,
    Copy,
    Fault,
    Generation,
    JobId,
    MachineId,
    Rank,
    Step,
    Term,
)
from everstep.paths import shm_dir
from everstep.trainer.context import VARIABLE, AttachContext
from tests.checkpoint.ranks import Ranks
from tests.examples import paced
from tests.integration.command import status_of
from tests.integration.support import wait_for
from tests.integration.test_survival import Trained, training

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


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
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


def test_sharded_training_survives_a_rank_and_the_machine_of_a_tensor_parallel_group(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Under the whole product, with nothing on disk; shards and replicas are those of DTensors."""
    machines = ("--local-machines", "2", "--nproc-per-node", "2", "--disk-every", "0")
    flags = (*machines, "--layout", "tp=2,dp=2", "--backup-every", "1")
    with training(tmp_path, "job", *flags, script=Path(paced.__file__)) as trained:
        trained.wait_steps(1)
        ranks.run(RANKS, paced.undisturbed, tmp_path)
        wait_for("backups", lambda: kept_on(trained, "m0") and kept_on(trained, "m1"))
        trained.inject(Fault.KILL_RANK, random.Random(1))
        wait_for("generation 2", lambda: generation(trained) == 2)
        trained.inject(Fault.LOSE_MACHINE, random.Random(2))
        wait_for("generation 3", lambda: generation(trained) == 3)
        trained.stop.touch()
        result = wait_for("the end", lambda: result_of(trained.paths))
        assert (result.outcome, result.exit_code) == ("finished", 0), result
        scope = partial(job_scope, trained.paths.root, spec_of(trained.paths))
        wait_for("the end of all", lambda: not scope().shm)
    told = offline.incidents(trained.paths).incidents
    assert sum(incident.recoveries for incident in told) == 2
    assert [len(incident.evicted) for incident in told][-1] == 1
    assert all(incident.restored is not None for incident in told)
    assert told[-1].restored != NO_STEP
    reference = (tmp_path / "undisturbed.log").read_text().splitlines()
    assert set(trained.log.read_text().splitlines()) == set(reference)
    for rank in ["", *(f"-{rank}" for rank in range(1, RANKS))]:
        digests = [(tmp_path / f"{name}{rank}").read_text() for name in ("undisturbed", "job")]
        assert digests[0] == digests[1]


def kept_on(trained: Trained, machine: str) -> list[Copy]:
    spec = spec_of(trained.paths)
    return Kept(shm_dir(spec.job, spec.uid, MachineId(machine))).inventory()


def generation(trained: Trained) -> int:
    """Of the ranks that run; 0 while none do."""
    status = status_of(trained.paths)
    return status.generation if status is not None and status.phase is Phase.RUNNING else 0
