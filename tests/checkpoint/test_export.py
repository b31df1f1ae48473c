"""An exported step is a directory that plain torch loads, whole, in any layout; and so do we."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel

import everstep
from everstep.checkpoint import disk
from everstep.checkpoint.export import ExportRefused, export
from everstep.checkpoint.format import ShardBad
from everstep.checkpoint.layout import is_distributed
from everstep.checkpoint.slots import ShardMissing
from everstep.checkpoint.tier import tier_at
from everstep.model import Generation, Rank, Step
from everstep.trainer.checkpoint import CheckpointUnusable
from everstep.trainer.notices import Notices
from everstep.trainer.run import Run
from tests.checkpoint.nets import LAYOUTS, Net, Training, checkpoint, same, trained
from tests.checkpoint.ranks import Ranks

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
STEP = Step(2)
SOURCE = str(Path(everstep.__file__).parents[1])


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    forked = Ranks()
    yield forked
    forked.close()


def whole(training: Training) -> dict[str, torch.Tensor]:
    """Parameters and their optimizer state, gathered: what the layout must not change."""
    found = {}
    for name, parameter in training.net.named_parameters():
        found[name] = parameter
        for what, value in training.optimizer.state[parameter].items():
            found[f"{name}/{what}"] = value
    return {
        name: (value.full_tensor() if is_distributed(value) else value).detach().clone()
        for name, value in found.items()
    }


def train_and_publish(layout: str, shm: str, place: str) -> None:
    training = trained(layout, shm)
    gathered = whole(training)
    dist.barrier()
    if dist.get_rank() == 0:
        publish(Path(shm), Path(place) / "steps", dist.get_world_size())
        torch.save(gathered, Path(place) / "whole.pt")


def publish(shm: Path, steps: Path, world_size: int) -> None:
    for rank in range(world_size):
        disk.persist(shm, Rank(rank), STEP, steps)
    disk.publish(steps, STEP, Generation(1), world_size, keep=1)


def go_on_with_other_ranks(shm: str, place: str, savers: int) -> None:
    """Sharded state, in an elastic job that has another size now."""
    again = Training("fsdp", seed=7)
    steps = str(Path(place) / "steps")
    ckpt = checkpoint(shm, again.state, restore=STEP, directory=steps, saved_by=(None, savers))
    assert ckpt.restore() == STEP + 1
    before = torch.load(Path(place) / "whole.pt")
    gathered = whole(again)
    assert gathered.keys() == before.keys()
    assert same([gathered[key] for key in before], list(before.values()))
    again.step()


@pytest.mark.parametrize(("before", "now"), [(3, 2), (2, 3)])
def test_other_numbers_of_ranks_go_on_with_sharded_state_by_way_of_the_disk(
    ranks: Ranks, shm: Path, tmp_path: Path, before: int, now: int
) -> None:
    ranks.run(before, train_and_publish, "fsdp", shm, tmp_path)
    ranks.run(now, go_on_with_other_ranks, shm, tmp_path, before)


def expected(place: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(place / "whole.pt")
    return loaded


def check(training: Training, place: str) -> None:
    found, wanted = whole(training), expected(Path(place))
    assert found.keys() == wanted.keys()
    assert same([found[name] for name in wanted], list(wanted.values()))


def exported(ranks: Ranks, layout: str, shm: Path, place: Path) -> Path:
    ranks.run(LAYOUTS[layout], train_and_publish, layout, shm, place)
    done = export(tier_at(str(place / "steps")), STEP, place / "dcp")
    assert done.notes == ()
    return place / "dcp"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_process_of_plain_torch_loads_every_layouts_export(
    ranks: Ranks, shm: Path, tmp_path: Path, layout: str
) -> None:
    directory = exported(ranks, layout, shm, tmp_path)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=7.0, foreach=False)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    state: dict[str, Any] = {
        "model": model_state,
        "optimizer": optimizer_state,
        "data": {f"rank-{rank}": {"position": 0, "rank": -1} for rank in range(LAYOUTS[layout])},
        "everstep": {"step": -1},
    }
    load(state, checkpoint_id=directory)
    set_state_dict(
        net,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    wanted = expected(tmp_path)
    for name, parameter in net.named_parameters():
        assert same([parameter.detach()], [wanted[name]])
        for what, value in optimizer.state[parameter].items():
            assert same([value], [wanted[f"{name}/{what}"]])
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert state["everstep"] == {"step": STEP}
    assert net.seen == 3
    for rank in range(LAYOUTS[layout]):
        assert state["data"][f"rank-{rank}"] == {"position": 3, "rank": rank}


def start(layout: str, directory: str, shm: str, place: str) -> None:
    training = Training(layout, seed=5)
    ckpt = checkpoint(shm, training.state, from_dcp=directory)
    assert ckpt.restore() == STEP + 1
    check(training, place)
    assert training.net.seen == 3
    fresh = dist.get_world_size() != 4
    assert (training.data.position, training.data.rank) == (0 if fresh else 3, dist.get_rank())
    training.step()
    ckpt.save(STEP + 1)
    ckpt.flush(30)
    again = Training(layout, seed=6)
    resumed = checkpoint(shm, again.state, restore=STEP + 1, from_dcp=directory)
    assert resumed.restore() == STEP + 2
    assert same(again.bits(), training.bits())


def test_a_job_starts_from_a_directory_of_another_layout_and_world_size(
    ranks: Ranks, shm: Path, tmp_path: Path
) -> None:
    directory = exported(ranks, "fsdp-tp", shm, tmp_path)
    for layout, size in {"hsdp": 4, "fsdp": 3, "ddp": 2}.items():
        url = f"local://{directory}" if layout == "ddp" else directory
        ranks.run(size, start, layout, url, shm / layout, tmp_path)


def plain_save(layout: str, directory: str, place: str, flat: int) -> None:
    """As scripts without everstep do it; torchtitan makes the optimizer's state flat."""
    training = Training(layout)
    for _ in range(3):
        training.step()
    options = StateDictOptions(flatten_optimizer_state_dict=bool(flat))
    model, optimizer = get_state_dict(training.net, training.optimizer, options=options)
    save({"model": model, "optimizer": optimizer}, checkpoint_id=directory)
    gathered = whole(training)
    if dist.get_rank() == 0:
        torch.save(gathered, Path(place) / "whole.pt")


def start_elsewhere(layout: str, directory: str, shm: str, place: str) -> None:
    training = Training(layout, seed=5)
    training.optimizer.param_groups[0]["lr"] = 7.0
    assert checkpoint(shm, training.state, from_dcp=directory).restore() == 0
    check(training, place)
    assert training.optimizer.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("flat", [0, 1])
def test_a_job_starts_from_what_plain_torch_saved(
    ranks: Ranks, shm: Path, tmp_path: Path, flat: int
) -> None:
    ranks.run(2, plain_save, "fsdp", tmp_path / "dcp", tmp_path, flat)
    ranks.run(4, start_elsewhere, "fsdp-tp", tmp_path / "dcp", shm, tmp_path)


class Seen(Net):
    """Has extra state beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"tokens": self.tokens}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.tokens = state["tokens"]


def save_wrapped(shm: str, place: str) -> None:
    net = Seen()
    net.tokens = 11
    wrapped = DistributedDataParallel(net)
    ckpt = checkpoint(shm, {"net": wrapped})
    ckpt.save(STEP)
    ckpt.flush(30)
    dist.barrier()
    if dist.get_rank() == 0:
        publish(Path(shm), Path(place) / "steps", dist.get_world_size())
        torch.save(net.state_dict(), Path(place) / "net.pt")


def test_a_wrapped_model_has_the_keys_of_the_model_and_its_extra_state(
    ranks: Ranks, shm: Path, tmp_path: Path
) -> None:
    ranks.run(2, save_wrapped, shm, tmp_path)
    export(tier_at(str(tmp_path / "steps")), STEP, tmp_path / "dcp")
    net = Seen()
    ckpt = Run(None, Notices(None, Rank(-1), Generation(0)), None).checkpoint(
        {"net": net}, from_dcp=tmp_path / "dcp"
    )
    assert ckpt.restore() == STEP + 1
    assert net.tokens == 11
    wanted = torch.load(tmp_path / "net.pt")
    assert same(list(net.parameters()), [wanted[name] for name, _ in net.named_parameters()])


def start_from_less(directory: str, shm: str) -> None:
    training = Training("ddp")
    wide = {"model": torch.nn.Linear(3, 3), "optimizer": training.optimizer}
    with pytest.raises(CheckpointUnusable, match=r"'model'.*lacks weight, bias"):
        checkpoint(shm, wide, from_dcp=directory).restore()
    with pytest.raises(CheckpointUnusable, match=r"nothing of 'net'.*begin with .*'model'"):
        checkpoint(shm, {"net": training.net}, from_dcp=directory).restore()
    with pytest.raises(CheckpointUnusable, match="is no directory of torch"):
        checkpoint(shm, training.state, from_dcp=shm).restore()
    with pytest.raises(CheckpointUnusable, match=r"needs fsspec.*everstep\[remote\].*s3fs"):
        checkpoint(shm, training.state, from_dcp="s3://bucket/dcp").restore()
    with pytest.raises(CheckpointUnusable, match=r"is no directory of torch.*Protocol not known"):
        checkpoint(shm, training.state, from_dcp="nowhere://bucket/dcp").restore()


def test_a_directory_that_does_not_fit_is_refused_with_the_reason(
    ranks: Ranks, shm: Path, tmp_path: Path
) -> None:
    directory = exported(ranks, "ddp", shm, tmp_path)
    ranks.run(1, start_from_less, directory, shm)


def test_a_damaged_or_missing_shard_is_not_exported(
    ranks: Ranks, shm: Path, tmp_path: Path
) -> None:
    ranks.run(2, train_and_publish, "ddp", shm, tmp_path)
    steps = tmp_path / "steps"
    tier = tier_at(str(steps))
    with pytest.raises(ShardMissing, match="step 7 is not published"):
        export(tier, Step(7), tmp_path / "none")
    shard = disk.shard_path(steps, STEP, Rank(1))
    content = bytearray(shard.read_bytes())
    content[-70] ^= 4
    shard.write_bytes(content)
    with pytest.raises(ShardBad, match=r"rank-1\.shard is damaged"):
        export(tier, STEP, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(ExportRefused, match="not empty"):
        export(tier, STEP, steps)


SCRIPT = """
import sys
import torch
from torch import nn
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.state_dict import get_state_dict

up = nn.Linear(10, 14)
model = nn.ModuleDict({"up": up})
optimizer = torch.optim.AdamW(model.parameters())
model_state, optimizer_state = get_state_dict(model, optimizer)
optimizer_state.pop("param_groups")
data = {"rank-1": {"position": 0}}
load({"model": model_state, "optimizer": optimizer_state, "data": data}, checkpoint_id=sys.argv[1])
wanted = torch.load(sys.argv[2])
assert torch.equal(up.weight, wanted["up.weight"])
moment = optimizer_state["state"]["up.weight"]["exp_avg_sq"]
assert torch.equal(moment, wanted["up.weight/exp_avg_sq"])
assert data == {"rank-1": {"position": 3}}
assert not [name for name in sys.modules if name.startswith("everstep")]
"""


def test_the_command_exports_for_scripts_that_know_nothing_of_everstep(
    ranks: Ranks, shm: Path, tmp_path: Path
) -> None:
    ranks.run(2, train_and_publish, "tp", shm, tmp_path)
    words = ("checkpoint", "export", "newest", "exported", "--from", "steps")
    done = subprocess.run(
        [sys.executable, "-m", "everstep", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"step {STEP} is in exported: ")
    assert done.stderr == ""
    script = [sys.executable, "-W", "ignore", "-c", SCRIPT, "exported", "whole.pt"]
    subprocess.run(script, cwd=tmp_path, check=True)
