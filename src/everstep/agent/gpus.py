"""Whether ranks that are gone have let go of the GPUs of this machine: a part of the proof.

A process that is gone from /proc may still be taken apart by the driver, and new ranks would find
its memory in use. The driver is asked by a child process, for a sick one may never answer; then it
says nothing, and the proof is what the kernel says. Used by effects.py.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from everstep.agent.checks.check import Here, NotReadable, Source
from everstep.agent.checks.children import Child, Unanswered
from everstep.agent.checks.gpu.library import Library, NvmlFailed, is_ours, why_absent
from everstep.agent.checks.gpu.reading import Reading, identity, read_pids
from everstep.agent.checks.gpu.samples import Signal
from everstep.agent.checks.judging import Failed
from everstep.agent.checks.surroundings import gpus_of
from everstep.agent.log import say
from everstep.agent.memory import Memory
from everstep.agent.this_machine import ThisMachine
from everstep.model import Seconds, Value
from everstep.processes import Process, identify

PATIENCE_S: Seconds = 2.0
"""Longest wait for one answer: a driver that is well takes milliseconds, and a restart waits."""
READY_WITHIN_S: Seconds = 60.0
"""The first answer takes as long as an interpreter and cold GPUs take to start."""
LOOK_AGAIN_S: Seconds = 0.1
"""Between two looks: the driver takes a process apart in some tenths of a second."""
IDLE_MIB = 1024.0
"""What a GPU may have in use that nobody uses: about 600 are the driver's own with ECC on Hopper
(agent/checks/gpu/memory_left.py)."""
NEAR_MIB = 256.0
"""So much more than before ranks started is as before: the driver keeps small things for itself.
The context of one process alone takes 400 and more on the GPUs of servers."""


class GpuUse(Value, frozen=True, kw_only=True):
    """Who uses one GPU."""

    pci: str
    used_mib: float | None = None
    pids: tuple[int, ...] = ()


class GpusUse(Value, frozen=True, kw_only=True):
    """Of all that the job uses here."""

    gpus: tuple[GpuUse, ...]


class GpusSource(Source[GpusUse]):
    """Asks NVML. No check reads it: it is asked when ranks have ended."""

    name = "gpu users"
    kind = GpusUse
    every_s = 0.0
    blocks = True
    within_s = PATIENCE_S

    def __init__(self) -> None:
        self._library = Library()

    def absent(self, here: Here) -> str:
        return why_absent(here)

    def sample(self, here: Here) -> GpusUse:
        try:
            if self._library.open():
                raise NotReadable("the GPUs are still starting")
            count = int(self._library.nvml.nvmlDeviceGetCount())
        except (NvmlFailed, self._library.nvml.NVMLError) as error:
            self._library.forget()
            raise NotReadable(str(error)) from error
        every = (self._use(index) for index in range(count))
        return GpusUse(gpus=tuple(use for use in every if use and is_ours(use.pci, here)))

    def _use(self, index: int) -> GpuUse | None:
        nvml = self._library.nvml
        reading = Reading(nvml, index)
        handle = reading.ask(Signal.IDENTITY, lambda: nvml.nvmlDeviceGetHandleByIndex(index))
        if handle is None:
            return None
        used = reading.ask(
            Signal.MEMORY_USED_MIB, lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used
        )
        return GpuUse(
            pci=identity(reading, handle, None).pci,
            used_mib=None if used is None else float(used) * 2.0**-20,
            pids=tuple(sorted(read_pids(reading, handle))),
        )


class Held(NamedTuple):
    """What is still in use."""

    pids: tuple[int, ...] = ()
    why: str = ""
    """Empty: nothing, or nothing can be told."""


class Gpus:
    """The GPUs of one machine's job."""

    def __init__(self, here: ThisMachine, memory: Memory, quiet: Callable[[], bool]) -> None:
        """`memory`: of a former agent, for the next one. `quiet`: whether no rank runs."""
        environ = {**os.environ, **here.setup.env, **here.spec.env}
        self._here = Here(gpus=gpus_of(environ.get("CUDA_VISIBLE_DEVICES")))
        self._shared = here.spec.local
        """Stand-ins may use the same GPU: what is in use says nothing of one of them."""
        self._idle = memory.idle_gpus
        self._quiet = quiet
        self._child = Child(GpusSource(), here.paths.root, memory.gpus_child, self._keep)
        self._memory = memory
        self._asking: asyncio.Task[bytes | Failed | Unanswered] | None = None

    def _keep(self) -> None:
        self._memory.gpus_child = self._child.kept

    async def get_ready(self) -> None:
        """Start the child, and note what is in use before ranks start: that is nobody's of ours."""
        if why_absent(self._here):
            return
        use = await self._look(READY_WITHIN_S)
        if use is not None and self._quiet() and not self._idle:
            known = {gpu.pci: gpu.used_mib for gpu in use.gpus}
            self._idle.update({pci: mib for pci, mib in known.items() if mib is not None})

    async def freed(self, ended: Mapping[int, Process], deadline: Seconds) -> Held:
        """Wait until these have let go of all GPUs, at most until then, on the loop's clock."""
        if not ended or why_absent(self._here):
            return Held()
        clock = asyncio.get_running_loop().time
        while True:
            left_s = deadline - clock()
            use = await self._look(min(PATIENCE_S, max(LOOK_AGAIN_S, left_s)))
            held = Held() if use is None else self._held(use, ended)
            if not held.why or left_s <= 0:
                return held
            await asyncio.sleep(LOOK_AGAIN_S)

    async def close(self) -> None:
        """End the child."""
        await self._child.close()

    def _held(self, use: GpusUse, ended: Mapping[int, Process]) -> Held:
        for gpu in use.gpus:
            ours = tuple(pid for pid in gpu.pids if pid in ended and not _reused(ended[pid]))
            if ours:
                pids = ", ".join(map(str, ours))
                return Held(ours, f"ranks that ended still use GPU {gpu.pci} (pids {pids})")
            idle, used = self._idle.get(gpu.pci), gpu.used_mib
            if idle is None or used is None or gpu.pids or self._shared:
                continue
            if used > max(IDLE_MIB, idle + NEAR_MIB):
                return Held(
                    why=f"GPU {gpu.pci} has {used:.0f} MiB in use by nobody to be seen, and had"
                    f" {idle:.0f} before ranks started"
                )
        return Held()

    async def _look(self, within_s: Seconds) -> GpusUse | None:
        """None: nothing can be told. A question that is not answered in time goes on by itself."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + within_s
        if self._asking is not None:  # what it tells was so before
            await asyncio.wait({self._asking}, timeout=within_s)
            if not self._asking.done():
                return None
        self._asking = asyncio.create_task(self._child.ask(self._here))
        await asyncio.wait({self._asking}, timeout=max(0.0, deadline - clock()))
        if not self._asking.done():
            return None
        answer, self._asking = self._asking.result(), None
        if isinstance(answer, bytes):
            return msgspec.msgpack.decode(answer, type=GpusUse)
        say(f"GPUs were not asked whether ranks have let go of them: {answer.why}")
        return None


def _reused(process: Process) -> bool:
    """Whether another process has its pid by now."""
    now = identify(process.pid)
    return now is not None and now != process


def by_pid(processes: Iterable[Process]) -> dict[int, Process]:
    return {process.pid: process for process in processes}
