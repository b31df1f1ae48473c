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
    lost_s: Seconds = 60.0
    """Seconds without a registration before it counts: a fabric manager that is started again, for
    an update say, registers all GPUs anew, and those that compute go on."""


class Fabric(PerGpu[FabricLimits]):
    """State and status of the registration. Evicts if it had worked."""

    name = "gpu.fabric"
    about = "GPUs are registered with their NVSwitch fabric (NVML's fabric info)"
    limits_type = FabricLimits
    keep = 12

    def judge_gpu(self, gpu: History[Gpu], sample: NvmlSample) -> Result | None:
        del sample
        now = gpu.now.sample
        state = now.get(Signal.FABRIC_STATE)
        if state is None or state == NOT_SUPPORTED:
            return None
        wrong = _wrong(now)
        if not wrong:
            return self._registered(now)
        for_s = _for_s(gpu)
        if for_s < self.limits.lost_s or gpu.now.at < self.limits.after_boot_s:
            return self.passed(f"{wrong}, for {for_s:.0f} s so far", item=now.name)
        worked = not _wrong(gpu.first.sample)
        return self.found(
            Verdict.EVICT if worked else Verdict.SUSPECT,
            Category.GPU_UNAVAILABLE,
            f"{wrong}, for {for_s:.0f} s",
            DO,
            item=now.name,
            cause="fabric manager",
        )

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


def _for_s(gpu: History[Gpu]) -> Seconds:
    """For how long something has been wrong."""
    since = gpu.now.at
    for each in reversed(gpu.past):
        if not _wrong(each.sample):
            break
        since = each.at
    return gpu.now.at - since


def _wrong(gpu: Gpu) -> str:
    """What is wrong with the registration; empty: nothing, or it is not known."""
    state, status = gpu.get(Signal.FABRIC_STATE), gpu.get(Signal.FABRIC_STATUS)
    if state is None or state == NOT_SUPPORTED or (state == COMPLETED and not status):
        return ""
    name = STATES.get(int(state), f"unknown ({state:.0f})")
    return f"fabric registration is {name}, status {status or 0:.0f}"
