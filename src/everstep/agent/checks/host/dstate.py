"""Check host.dstate: tasks are stuck in the kernel, where no signal reaches them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.host.source_processes import ProcessesSample, Stuck
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result
from everstep.model import Seconds


class DstateLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of host.dstate."""

    rounds: int = 5
    """Samples in a row, a minute apart, in which the same task is stuck (gpud's number). A disk
    makes every task wait for milliseconds, and a large write-back for seconds."""
    ranks_only: bool = False
    """Say nothing of tasks that belong neither to the job nor to the GPU driver."""


class Dstate(Check[ProcessesSample, DstateLimits]):
    """The driver's own tasks, and whoever asks it (nvidia-smi), tell that a GPU's driver hangs."""

    name: ClassVar[str] = "host.dstate"
    source: ClassVar[str] = "processes"
    about: ClassVar[str] = "tasks stuck in the kernel for minutes (state D of /proc/PID/stat)"
    limits_type: ClassVar[type[Limits]] = DstateLimits
    keep: ClassVar[int] = 30
    clear_after_s: ClassVar[Seconds] = 120.0

    def judge(self, here: Here, history: History[ProcessesSample]) -> Iterable[Result]:
        del here
        samples = [each.sample for each in (*history.past, history.now)][-self.limits.rounds :]
        long: dict[tuple[int, int], Stuck] = {}
        if len(samples) >= self.limits.rounds:
            always = set.intersection(*(_names(each) for each in samples))
            long = {_name(each): each for each in samples[-1].stuck if _name(each) in always}
        for_s = history.now.at - (*history.past, history.now)[-len(samples)].at
        found = [self._judge(each, for_s) for each in long.values() if self._matters(each)]
        if found:
            yield from found
        else:
            stuck = len(history.now.sample.stuck)
            yield self.passed(f"{stuck} tasks wait in the kernel, none for long", stuck=stuck)

    def _matters(self, stuck: Stuck) -> bool:
        return bool(stuck.rank) or _of_driver(stuck) or not self.limits.ranks_only

    def _judge(self, stuck: Stuck, for_s: Seconds) -> Result:
        where = f" (in {stuck.where})" if stuck.where else ""
        why = f"{stuck.name}, pid {stuck.pid}, has been stuck for {for_s:.0f} s{where}"
        item = f"pid {stuck.pid}"
        if _of_driver(stuck):
            # No more than that: anybody may have such a name, and may write to storage that hangs.
            return self.found(
                Verdict.SUSPECT,
                Category.GPU_UNAVAILABLE,
                f"{why}: the GPU driver may hang, which gpu.answers would tell",
                "Restart the machine: nothing else ends a task that waits for a driver.",
                item=item,
            )
        if stuck.rank:
            return self.found(
                Verdict.SUSPECT,
                Category.JOB_HANG,
                f"{why}, and belongs to rank process {stuck.rank}",
                f"See what it waits for (cat /proc/{stuck.pid}/stack): storage, or a driver.",
                item=item,
            )
        return self.found(
            Verdict.WARN,
            Category.FILESYSTEM_MOUNT,
            why,
            f"See what it waits for (cat /proc/{stuck.pid}/stack): mostly storage.",
            item=item,
        )


def _of_driver(stuck: Stuck) -> bool:
    return stuck.name.startswith("nvidia")


def _name(stuck: Stuck) -> tuple[int, int]:
    return stuck.pid, stuck.start


def _names(sample: ProcessesSample) -> set[tuple[int, int]]:
    return {_name(each) for each in sample.stuck}
