"""Ranks are gone only when they have let go of the GPUs, as the driver says: a fake library, but a
real agent, real ranks and a real child process that asks.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.actions import StopRanks
from everstep.agent.gpus import Gpus, Held
from everstep.agent.memory import Memory, MemoryFile
from everstep.agent.this_machine import ThisMachine
from everstep.events import MachineJoined, RanksStopped, RanksSurvived
from everstep.model import Generation
from everstep.processes import Process, entry
from everstep.trainer.heartbeat import SlotReader
from tests.agent.checks.gpu.fake import FakeNvml
from tests.agent.fake_controller import MACHINE, FakeController
from tests.agent.support import Job, wait_for

MIB = 1 << 20
IDLE = 600 * MIB
USED = "nvmlDeviceGetMemoryInfo"
PIDS = "nvmlDeviceGetComputeRunningProcesses"


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """A driver that everything started from here on finds."""
    fake = FakeNvml(tmp_path / "nvml", gpus=2)
    fake.value(USED, IDLE)
    for name, value in fake.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("everstep.agent.checks.gpu.library._loadable", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


@pytest.fixture
def gone() -> Process:
    """A process that has ended."""
    child = os.fork()
    if not child:
        os._exit(0)
    there = entry(child)  # a zombie by now, or not yet
    os.waitpid(child, 0)
    assert there is not None
    return there.process


@pytest.fixture
def here(tmp_path: Path) -> ThisMachine:
    job = Job(tmp_path / "jobs", f"g{os.getpid()}")
    job.describe(["true"])
    return ThisMachine.read(job.machine.setup)


def ask(
    here: ThisMachine, gone: Process, within_s: float = 20.0, memory: Memory | None = None
) -> Held:
    """What is said of it, with time enough for a child to start."""

    async def run() -> Held:
        gpus = Gpus(here, memory or Memory(), lambda: True)
        try:
            await gpus.get_ready()
            deadline = asyncio.get_running_loop().time() + within_s
            return await gpus.freed({gone.pid: gone}, deadline)
        finally:
            await gpus.close()

    return asyncio.run(run())


def test_what_is_free_is_free_at_once_and_what_is_not_is_named(
    nvml: FakeNvml, here: ThisMachine, gone: Process
) -> None:
    assert ask(here, gone) == Held()
    nvml.value(PIDS, f"77,{gone.pid}", gpu=1)
    held = ask(here, gone, within_s=3.0)
    pci = nvml.pci(1)
    assert held == Held((gone.pid,), f"ranks that ended still use GPU {pci} (pids {gone.pid})")


def test_it_waits_for_what_is_freed_late(nvml: FakeNvml, here: ThisMachine, gone: Process) -> None:
    nvml.value(PIDS, str(gone.pid), gpu=0)
    nvml.value(PIDS, "88", gpu=0, in_s=1.0)
    assert ask(here, gone) == Held()


def test_memory_that_nobody_holds_is_what_ranks_left(
    nvml: FakeNvml, here: ThisMachine, gone: Process
) -> None:
    memory = Memory(idle_gpus={nvml.pci(0): 600.0, nvml.pci(1): 600.0})
    nvml.value(USED, 70_000 * MIB, gpu=1)
    held = ask(here, gone, within_s=3.0, memory=memory)
    assert held.pids == ()
    assert held.why == (
        f"GPU {nvml.pci(1)} has 70000 MiB in use by nobody to be seen, and had 600 before ranks"
        " started"
    )
    nvml.value(PIDS, "77", gpu=1)
    assert ask(here, gone, memory=memory) == Held(), "somebody else's"
    nvml.value(PIDS, "", gpu=1)
    nvml.say(f"{USED} gpu=1 value={1000 * MIB}")
    assert ask(here, gone, memory=memory) == Held(), "the driver's own"


def test_what_was_in_use_before_ranks_started_is_not_theirs(
    nvml: FakeNvml, here: ThisMachine, gone: Process
) -> None:
    nvml.value(USED, 50_000 * MIB)
    assert ask(here, gone) == Held()


@pytest.mark.parametrize("broken", ["hangs", "fails"])
def test_a_driver_that_does_not_answer_says_nothing(
    nvml: FakeNvml, here: ThisMachine, gone: Process, broken: str
) -> None:
    nvml.value(PIDS, str(gone.pid), gpu=0)
    if broken == "hangs":
        nvml.hang("nvmlDeviceGetCount")
    else:
        nvml.fail("nvmlInit", 9)
    assert ask(here, gone) == Held()


@pytest.fixture
def machine(tmp_path: Path, nvml: FakeNvml) -> Iterator[tuple[Job, FakeController]]:
    job = Job(tmp_path / "jobs", f"h{os.getpid()}")
    job.describe(["sleep", "1000"], no_python=True)
    controller = FakeController(job.paths)
    job.start("agent", "launcher")
    controller.get(MachineJoined)
    yield job, controller
    job.stop()
    controller.stop()


def test_ranks_that_keep_a_gpu_have_survived(
    machine: tuple[Job, FakeController], nvml: FakeNvml
) -> None:
    job, controller = machine
    wait_for("what is idle", lambda: len(MemoryFile(job.shm).read().idle_gpus) == 2)
    controller.start_ranks(job.next_generation())
    reader = SlotReader(job.shm / "heartbeat", 2)
    beats = [beat for beat in reader.read() if beat is not None]
    reader.close()
    nvml.value(PIDS, str(beats[1].pid), gpu=0)
    order = StopRanks(
        id="1.99",
        cause="test",
        why="a test",
        machine=MACHINE,
        generation=Generation(2),
        within_s=2.0,
    )
    controller.order(order)
    said = controller.get(RanksSurvived)
    assert (said.pids, said.action) == ((beats[1].pid,), order.id)
    assert f"ranks that ended still use GPU {nvml.pci(0)}" in said.reason
    nvml.heal()
    nvml.value(USED, IDLE)
    assert isinstance(controller.stop_ranks(3), RanksStopped)
