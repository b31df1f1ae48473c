"""Checks of saving from a GPU: every kind of tensor, and that the host does not wait."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from everstep.checkpoint import slots
from everstep.checkpoint.capture import Stateful
from everstep.model import Generation, JobId, MachineId, Rank, Step, Term
from everstep.trainer.context import AttachContext
from everstep.trainer.notices import Notices
from everstep.trainer.place import Place
from everstep.trainer.run import Run
from tests.checkpoint.objects import DTYPES, Box, of_dtype, same_bits
from tests.gpu.answers import Answer, CannotRun

WITHIN_S = 30.0
EXPECTED = ("bool", "uint8", "int64", "float16", "bfloat16", "float32", "float8_e4m3fn")


@contextlib.contextmanager
def shared_memory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="everstep-gpu-", dir="/dev/shm"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def run_on(shm: Path, generation: int, restore: int = -1, made_by: int = 1) -> Run:
    """Rank 0 of 1, as the agent would start it."""
    context = AttachContext(
        job=JobId("gpu"),
        machine=MachineId("m0"),
        term=Term(1),
        generation=Generation(generation),
        rank=Rank(0),
        local_rank=0,
        world_size=1,
        shm=str(shm),
        notice_socket=str(shm / "none"),
        restore=Step(restore),
        restore_generation=Generation(made_by),
        checkpoint_dir=str(shm / "none"),
    )
    notices = Notices(shm / "none", context.rank, context.generation)
    return Run(Place(context=context, local_ranks=1), notices, None)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def tensors_of_every_kind(device: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for dtype in DTYPES:
        with contextlib.suppress(NotImplementedError):  # int1 to int7: torch cannot copy them
            found[str(dtype)] = of_dtype(dtype).to(device).clone()
    assert {f"torch.{name}" for name in EXPECTED} <= set(found), sorted(found)
    found |= {
        "scalar": torch.tensor(3.5, device=device),
        "empty": torch.empty(0, device=device),
        "no rows": torch.empty(3, 0, 2, dtype=torch.bfloat16, device=device),
        "transposed": torch.randn(40, 50, device=device).t(),
        "channels last": torch.randn(2, 3, 4, 5, device=device).to(
            memory_format=torch.channels_last
        ),
        "every third": torch.randn(100, device=device)[::3],
        "a window": torch.randn(60, 80, device=device)[10:40, 20:50],
        "expanded": torch.randn(3, 1, device=device).expand(3, 7),
        "conjugated": torch.randn(3, dtype=torch.complex64, device=device).conj(),
    }
    return found


def matrix(device: str) -> Answer:
    """A model and its optimizer from the background, and each kind of tensor at once."""
    torch.manual_seed(1)
    boxed = tensors_of_every_kind(device)
    want = {name: tensor.detach().clone() for name, tensor in boxed.items()}
    with shared_memory() as shm:
        saved = model_of_every_float(device)
        state: dict[str, Stateful] = {"model": saved[0], "optimizer": saved[1], "box": Box(boxed)}
        run = run_on(shm, 1)
        checkpoint = run.checkpoint(state)
        checkpoint.restore()
        for step in range(5):
            update(saved)
            checkpoint.save(step)
        checkpoint.wait()
        run.stop()
        synchronize(device)
        (newest,) = [c for c in slots.inventory(shm, [Rank(0)]) if c.step == 4]
        loaded = model_of_every_float(device)
        box = Box()
        again = run_on(shm, 2, newest.step)
        into: dict[str, Stateful] = {"model": loaded[0], "optimizer": loaded[1], "box": box}
        assert again.checkpoint(into).restore() == newest.step + 1
        again.stop()
        for name, tensor in want.items():
            assert same_bits(box.value[name].cpu(), tensor.cpu()), name
        for one, other in zip(all_of(saved), all_of(loaded), strict=True):
            assert one.device == other.device
            assert same_bits(one.cpu(), other.cpu())
    return Answer(f"{len(want)} kinds of tensors, bit for bit", {"kinds": sorted(want)})


Trained = tuple[torch.nn.Module, torch.optim.Optimizer]


def model_of_every_float(device: str) -> Trained:
    model = torch.nn.ParameterList(
        torch.randn(257, 33, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    ).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def update(trained: Trained) -> None:
    model, optimizer = trained
    for parameter in model.parameters():
        parameter.grad = torch.sin(parameter.detach())
    optimizer.step()


def all_of(trained: Trained) -> list[torch.Tensor]:
    model, optimizer = trained
    found = [parameter.detach() for parameter in model.parameters()]
    for values in optimizer.state_dict()["state"].values():
        found += [value for value in values.values() if isinstance(value, torch.Tensor)]
    return found


class Load:
    """A model of one weight, and steps that keep the device busy for long after they are queued."""

    def __init__(self, device: str, size: int) -> None:
        torch.manual_seed(2)
        self.device = device
        self.weight = torch.nn.Parameter(torch.randn(size, device=device))
        self.optimizer = torch.optim.AdamW([self.weight], lr=0.01)
        side = 8192 if device == "cuda" else 64
        self._square = torch.randn(side, side, device=device)

    def state(self) -> dict[str, Stateful]:
        return {"model": Module(self.weight), "optimizer": self.optimizer}

    def forward_backward(self) -> None:
        for _ in range(20):
            self._square = torch.tanh(self._square @ self._square)
        self.weight.grad = torch.sin(self.weight.detach())


def host_does_not_wait(device: str) -> Answer:
    """The host's time for save() and the optimizer's step, beside that of the device.

    The device has work queued for much longer than both take: if either waited for the copy, it
    would wait for that, too. What is saved must be what the device computed by then, although the
    optimizer's step was queued long before the copy began.
    """
    size = fitting_size(device)
    load = Load(device, size)
    host_s, device_s = [], []
    with shared_memory() as shm:
        run = run_on(shm, 1)
        checkpoint = run.checkpoint(load.state())
        checkpoint.restore()
        for step in range(8):
            checkpoint.flush(WITHIN_S)  # the step before is kept: no save waits for another
            synchronize(device)
            began = time.perf_counter()
            load.forward_backward()
            queued = time.perf_counter()
            checkpoint.save(step)
            expected = load.weight.detach().clone()
            load.optimizer.step()
            returned = time.perf_counter()
            synchronize(device)
            host_s.append(returned - queued)
            device_s.append(time.perf_counter() - began)
        checkpoint.flush(WITHIN_S)
        pinned = pinned_slots(checkpoint)
        run.stop()
        again = Load(device, size)
        restoring = run_on(shm, 2, 7)
        began = time.perf_counter()
        restoring.checkpoint(again.state()).restore()
        synchronize(device)
        restored_s = time.perf_counter() - began
        restoring.stop()
        assert torch.equal(again.weight, expected), "what was saved is not what was computed"
    # The first saves reserve, fault in and pin the slots.
    host, whole = statistics.median(host_s[4:]), statistics.median(device_s[4:])
    figures = {"state_bytes": 3 * 4 * size, "host_s": host_s, "step_s": device_s}
    figures |= {"pinned_slots": pinned, "restore_s": restored_s}
    if device == "cuda":
        assert pinned > 0, "no slot could be pinned (cudaHostRegister refused): see ulimit -l"
        assert host < 0.2 * whole, f"the host waited {host:.3f} s of {whole:.3f} s"
    return Answer(f"host {host * 1e3:.1f} ms of {whole * 1e3:.1f} ms per step", figures)


def fitting_size(device: str) -> int:
    """Elements of the weight: half a GiB, or what five slots of it and its moments fit into."""
    free = shutil.disk_usage("/dev/shm").free
    size = min(1 << 27 if device == "cuda" else 1 << 20, free // (5 * 3 * 4))
    if size < 1 << 20:
        raise CannotRun(f"/dev/shm has {free >> 20} MiB free, and 60 MiB are needed")
    return size


class Module(torch.nn.Module):
    """One parameter."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def pinned_slots(checkpoint: Any) -> int:
    """How many slots the driver has registered, seen from inside."""
    transfer = checkpoint._memory._transfer
    return sum(address != 0 for address, _ in getattr(transfer, "_pinned", {}).values())
