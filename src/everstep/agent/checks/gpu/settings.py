"""Settings that should be the same on all GPUs of a machine, and modes that hide signals."""

from __future__ import annotations

from everstep.agent.checks.check import History, Limits
from everstep.agent.checks.gpu.per_gpu import PerGpu
from everstep.agent.checks.gpu.samples import Gpu, NvmlSample, Signal
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result


class Settings(PerGpu[Limits]):
    """Error correction that is off on some, and partitioned GPUs."""

    name = "gpu.settings"
    about = "error correction is on for all GPUs or none; MIG is off (NVML)"

    def judge_gpu(self, gpu: History[Gpu], sample: NvmlSample) -> Result | None:
        now = gpu.now.sample
        ecc = now.get(Signal.ECC_MODE)
        if now.get(Signal.MIG):
            why = "the GPU is partitioned (MIG), which hides most signals"
            return self.could_not_run(why, item=now.name)
        if ecc is None:
            return None
        if ecc or not any(other.get(Signal.ECC_MODE) for other in sample.gpus):
            return self.passed(f"error correction is {'on' if ecc else 'off'}", item=now.name)
        return self.found(
            Verdict.WARN,
            Category.GPU_MEMORY_ERROR,
            "error correction is off, and on for other GPUs of the machine",
            "Turn it on with nvidia-smi -e 1, and reset the GPU.",
            item=now.name,
        )
