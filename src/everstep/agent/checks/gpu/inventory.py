"""Whether the machine still has the GPUs with which it came to the job."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.gpu.per_gpu import baseline
from everstep.agent.checks.gpu.samples import Gpu, NvmlSample
from everstep.agent.checks.xids import gpu_item
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result


class InventoryLimits(Limits, frozen=True, kw_only=True):
    """What gpu.inventory expects."""

    count: int = 0
    """GPUs that a machine must have; 0: as many as at first. A machine that boots with seven of its
    eight is well by its own measure, and gets no job that wants eight (HPC sites' node checks
    expect a number, too). Not compared where the job uses only some (CUDA_VISIBLE_DEVICES)."""


class Inventory(Check[NvmlSample, InventoryLimits]):
    """Count and identity against the first sample, and the site's number."""

    name = "gpu.inventory"
    source = "nvml"
    about = "the GPUs are those that were here at the start: count, address, UUID, serial number"
    limits_type = InventoryLimits

    def judge(self, here: Here, history: History[NvmlSample]) -> Iterable[Result]:
        now = history.now.sample
        first = baseline(history)
        if now.silent_as_a_whole:
            yield self.could_not_run(now.silent_as_a_whole)
            return
        before = history.past[-1].sample if history.past else now
        if first is not None and (gone := _gone(first.sample, now)):
            if gone == _gone(first.sample, before):
                yield self._missing(first.sample, now, gone)
            else:
                yield self.passed(f"{', '.join(gone)} missing, once so far")
            return
        if len(now.gpus) < self.limits.count and not here.gpus:
            yield self._too_few(len(now.gpus))
            return
        if first is None:
            yield self.passed("no GPU, as at the start")
            return
        changed = _changed(first.sample, now)
        if changed and changed == _changed(first.sample, before):
            yield self._changed(changed)
        else:
            yield self.passed(f"{len(now.gpus)} GPUs, as at the start", gpus=len(now.gpus))

    def _missing(self, first: NvmlSample, now: NvmlSample, gone: list[str]) -> Result:
        """A container that may use its GPUs no more is told the same; the ranks in it go on."""
        hidden = set(gone) <= {gpu_item(pci) for pci in now.on_bus}
        also = "; on the PCI bus they answer" if hidden else ""
        return self.found(
            Verdict.SUSPECT if hidden else Verdict.EVICT,
            Category.GPU_UNAVAILABLE,
            f"{len(now.gpus)} of {len(first.gpus)} GPUs are left; missing: {', '.join(gone)}{also}",
            "See whether this container may still use them (nvidia-smi in it and outside)."
            if hidden
            else "Reboot the machine; if it stays so, ask the vendor.",
            values={"gpus": float(len(now.gpus))},
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
        """Twice the same, as if one is missing: one answer may be garbage."""
        return self.found(
            Verdict.EVICT,
            Category.GPU_UNAVAILABLE,
            f"not the GPU that was here at the start: {'; '.join(changed)}",
            "Find out who changed the machine while the job ran.",
        )


def _gone(first: NvmlSample, now: NvmlSample) -> list[str]:
    """Those of the start that are missing, if there are fewer; none if NVML tells nothing."""
    if now.silent_as_a_whole or len(now.gpus) >= len(first.gpus):
        return []
    return sorted({gpu.name for gpu in first.gpus} - {gpu.name for gpu in now.gpus}) or ["unknown"]


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
