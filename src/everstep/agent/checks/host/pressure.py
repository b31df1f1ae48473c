"""Check host.pressure: tasks wait for processors, memory or disks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.host.reading import percent
from everstep.agent.checks.host.source_load import LoadSample, Pressure
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result


class PressureLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of host.pressure: shares of the last minute."""

    cpu: float = 0.5
    """In which a task had to wait for a processor: the machine does more than it can."""
    memory: float = 0.2
    """In which all tasks waited for memory: the kernel is busy with taking pages away."""
    io: float = 0.6
    """In which all tasks waited for disks. High, because loading a checkpoint is nothing else."""


_KINDS = {
    "cpu": (Category.CPU_OVERLOAD, "See what else runs here (top), and how many data loaders."),
    "memory": (Category.CPU_OOM, "See what uses memory (ps --sort=-rss), before the OOM killer."),
    "io": (Category.MFU_DECLINE, "See who reads and writes (iotop), and whether a disk is slow."),
}


class Pressures(Check[LoadSample, PressureLimits]):
    """Never more than a warning. A kernel without /proc/pressure has nothing to look at."""

    name: ClassVar[str] = "host.pressure"
    source: ClassVar[str] = "load"
    about: ClassVar[str] = "tasks wait for processors, memory or disks (/proc/pressure)"
    limits_type: ClassVar[type[Limits]] = PressureLimits

    def judge(self, here: Here, history: History[LoadSample]) -> Iterable[Result]:
        del here
        for name, pressure in history.now.sample.pressure.items():
            if name in _KINDS:
                yield self._judge(name, pressure)

    def _judge(self, name: str, pressure: Pressure) -> Result:
        who, part = ("tasks", pressure.some) if name == "cpu" else ("all tasks", pressure.full)
        most = {"cpu": self.limits.cpu, "memory": self.limits.memory, "io": self.limits.io}[name]
        why = f"{who} waited for {name} in {percent(part)} of the last minute"
        if part <= most:
            return self.passed(why, item=name, waiting_ratio=part)
        category, do = _KINDS[name]
        why = f"{why}, more than {percent(most)}"
        return self.found(
            Verdict.WARN, category, why, do, item=name, values={"waiting_ratio": part}
        )
