"""Whether a GPU belongs to its NVSwitch fabric. Without that, CUDA fails with error 802."""

from __future__ import annotations

from everstep.agent.checks.check import History, Limits
from everstep.agent.checks.gpu.per_gpu import PerGpu
from everstep.agent.checks.gpu.samples import Gpu, NvmlSample, Signal
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Counts, Result
from everstep.model import Seconds

NOT_SUPPORTED, COMPLETED = 0, 3
STATES = {1: "not started", 2: "in progress", COMPLETED: "completed"}
DEGRADED_MASK, DEGRADED = 0x3, 1
"""NVML_GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_*."""
DO = "Restart the fabric manager while no job runs, and read its log; then test NVLink."


class FabricLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of gpu.fabric."""

    after_boot_s: Seconds = 300.0
    """Seconds that the fabric manager may take after a boot."""


class Fabric(PerGpu[FabricLimits]):
    """State and status of the registration. Evicts if it had worked, seen twice in a row."""

    name = "gpu.fabric"
    about = "GPUs are registered with their NVSwitch fabric (NVML's fabric info)"
    limits_type = FabricLimits

    def judge_gpu(self, gpu: History[Gpu], sample: NvmlSample) -> Result | None:
        del sample
        now = gpu.now.sample
        state = now.get(Signal.FABRIC_STATE)
        if state is None or state == NOT_SUPPORTED:
            return None
        wrong = _wrong(now)
        if not wrong:
            return self._registered(now)
        twice = bool(gpu.past) and _wrong(gpu.past[-1].sample) == wrong
        if not twice or gpu.now.at < self.limits.after_boot_s:
            return self.passed(f"{wrong}, so far", item=now.name)
        worked = not _wrong(gpu.first.sample)
        verdict = Verdict.EVICT if worked else Verdict.SUSPECT
        return self.found(verdict, Category.GPU_UNAVAILABLE, wrong, DO, item=now.name)

    def _registered(self, now: Gpu) -> Result:
        health = int(now.get(Signal.FABRIC_HEALTH) or 0)
        if health & DEGRADED_MASK != DEGRADED:
            return self.passed("registered with its fabric", item=now.name)
        return self.found(
            Verdict.WARN,
            Category.MFU_DECLINE,
            "the fabric says that this GPU's bandwidth is degraded",
            DO,
            item=now.name,
            counts=Counts.WITH_SLOWDOWN,
        )


def _wrong(gpu: Gpu) -> str:
    """What is wrong with the registration; empty: nothing, or it is not known."""
    state, status = gpu.get(Signal.FABRIC_STATE), gpu.get(Signal.FABRIC_STATUS)
    if state is None or state == NOT_SUPPORTED or (state == COMPLETED and not status):
        return ""
    name = STATES.get(int(state), f"unknown ({state:.0f})")
    return f"fabric registration is {name}, status {status or 0:.0f}"
