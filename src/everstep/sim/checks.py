"""What checks say in a simulated world: some of it true, some wrong, some noise.

A machine's own monitor outlives its agent, as the real one's baselines do: a new agent says again
what holds. Somebody else's monitor speaks to the controller and does so once.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from everstep.diagnosis.words import Category, Verdict
from everstep.events import AlertCleared, AlertRaised
from everstep.health import Alert, Counts, Result
from everstep.model import MachineId, Seconds

if TYPE_CHECKING:
    from everstep.sim.machine import Machine

FOREIGN = "alertmanager"


class Monitor:
    """Of one machine."""

    def __init__(self, machine: MachineId) -> None:
        self._machine = machine
        self._held: dict[tuple[str, str], tuple[Result, Seconds]] = {}

    def fails(self, result: Result, now: Seconds) -> AlertRaised:
        self._held[result.key] = (result, now)
        return AlertRaised(machine=self._machine, alert=Alert(result=result))

    def passes(self, result: Result) -> AlertCleared:
        self._held.pop(result.key, None)
        return AlertCleared(machine=self._machine, check=result.check, item=result.item)

    def grave(self) -> str:
        """What would evict it, if anything holds that would."""
        grave = (Verdict.EVICT, Verdict.SUSPECT)
        held = (result for result, _ in self._held.values() if result.verdict in grave)
        return next((result.why for result in held), "")

    def holding(self, now: Seconds) -> list[AlertRaised]:
        """What a new agent says first."""
        return [
            AlertRaised(machine=self._machine, alert=Alert(result=result, age_s=now - since))
            for result, since in self._held.values()
        ]


def foreign(machine: MachineId, result: Result, age_s: Seconds) -> AlertRaised:
    """What somebody else's monitor says."""
    alert = Alert(result=result, source=FOREIGN, age_s=age_s)
    return AlertRaised(machine=machine, alert=alert)


def lost_gpu(rng: Random) -> Result:
    return Result(
        check="gpu.lost",
        item=f"GPU {rng.randrange(2)}",
        verdict=Verdict.EVICT,
        why="the driver says that it is lost",
        category=Category.GPU_UNAVAILABLE,
    )


def doubtful_gpu(rng: Random) -> Result:
    return Result(
        check="gpu.rows",
        item=f"GPU {rng.randrange(2)}",
        verdict=rng.choice([Verdict.SUSPECT, Verdict.WARN, Verdict.USER, Verdict.ERROR]),
        why="a row is to be remapped",
        category=Category.GPU_MEMORY_ERROR,
    )


def hot_gpu(rng: Random) -> Result:
    return Result(
        check="gpu.temperature",
        item=f"GPU {rng.randrange(2)}",
        verdict=Verdict.WARN,
        why="it has 92 C",
        counts=Counts.WITH_SLOWDOWN,
    )


def down_link(rng: Random) -> Result:
    return Result(
        check="net.link",
        item=f"eth{rng.randrange(3)}",
        verdict=Verdict.WARN,
        why="it lost its carrier",
        category=Category.INFINIBAND_ERROR,
        counts=Counts.TWICE,
    )


def hung_storage(rng: Random) -> Result:
    return Result(
        check="host.mount",
        item="/data",
        verdict=rng.choice([Verdict.EVICT, Verdict.JOB]),
        why="it does not answer",
        category=Category.FILESYSTEM_MOUNT,
        cause="nfs server:/data",
    )


def kernel_fault(machine: Machine) -> Result:
    return Result(
        check="kernel.fault",
        verdict=Verdict.EVICT,
        why="the kernel says BUG",
        category=Category.OS_KERNEL_PANIC,
        cause=f"boot {machine.boot_id}",
    )


MAKERS: tuple[Callable[[Random], Result], ...] = (lost_gpu, doubtful_gpu, hot_gpu, down_link)
"""Of what befalls one machine."""
