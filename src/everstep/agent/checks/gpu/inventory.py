"""Whether the machine still has the GPUs with which it came to the job."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.gpu.per_gpu import baseline
from everstep.agent.checks.gpu.samples import Gpu, NvmlSample
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result


class InventoryLimits(Limits, frozen=True, kw_only=True):
    """What gpu.inventory expects."""

    count: int = 0
    """GPUs that a machine must have; 0: as many as at first. A machine that boots with seven of its
    eight is well by its own measure, and gets no job that wants eight (HPC sites' node checks
    expect a number, too)."""


class Inventory(Check[NvmlSample, InventoryLimits]):
    """Count and identity against the first sample, and the site's number."""

    name = "gpu.inventory"
    source = "nvml"
    about = "the GPUs are those that were here at the start: count, address, UUID, serial number"
    limits_type = InventoryLimits

    def judge(self, here: Here, history: History[NvmlSample]) -> Iterable[Result]:
        del here
        now = history.now.sample
        first = baseline(history)
        if now.silent_as_a_whole:
            yield self.could_not_run(now.silent_as_a_whole)
            return
        if first is not None and len(now.gpus) < len(first.sample.gpus):
            gone = sorted(_names(first.sample) - _names(now))
            yield self._missing(len(first.sample.gpus), len(now.gpus), gone)
            return
        if len(now.gpus) < self.limits.count:
            yield self._too_few(len(now.gpus))
            return
        if first is None:
            yield self.passed("no GPU, as at the start")
            return
        changed = _changed(first.sample, now)
        if changed and history.past and changed == _changed(first.sample, history.past[-1].sample):
            yield self._changed(changed)
        else:
            yield self.passed(f"{len(now.gpus)} GPUs, as at the start", gpus=len(now.gpus))

    def _missing(self, were: int, are: int, gone: list[str]) -> Result:
        return self.found(
            Verdict.EVICT,
            Category.GPU_UNAVAILABLE,
            f"{are} of {were} GPUs are left; missing: {', '.join(gone) or 'unknown'}",
            "Reboot the machine; if it stays so, ask the vendor.",
            values={"gpus": float(are)},
        )

    def _too_few(self, are: int) -> Result:
        return self.found(
            Verdict.EVICT,
            Category.GPU_UNAVAILABLE,
            f"{are} GPUs, and {self.limits.count} are expected here",
            "Reboot the machine; if it stays so, ask the vendor.",
            values={"gpus": float(are)},
        )

    def _changed(self, changed: list[str]) -> Result:
        """Twice the same: one answer may be garbage."""
        return self.found(
            Verdict.EVICT,
            Category.GPU_UNAVAILABLE,
            f"not the GPU that was here at the start: {'; '.join(changed)}",
            "Find out who changed the machine while the job ran.",
        )


def _names(sample: NvmlSample) -> set[str]:
    return {gpu.name for gpu in sample.gpus}


def _changed(first: NvmlSample, now: NvmlSample) -> list[str]:
    before = {gpu.pci: gpu for gpu in first.gpus if gpu.pci}
    return [
        f"{gpu.name} was {_identity(before[gpu.pci])}, is {_identity(gpu)}"
        for gpu in now.gpus
        if gpu.pci in before and _differ(before[gpu.pci], gpu)
    ]


def _differ(before: Gpu, now: Gpu) -> bool:
    pairs = ((before.uuid, now.uuid), (before.serial, now.serial))
    return any(old and new and old != new for old, new in pairs)


def _identity(gpu: Gpu) -> str:
    return f"{gpu.uuid} {gpu.serial}".strip()
