"""GPUs that refuse to work until somebody does something about them, as they say themselves."""

from __future__ import annotations

from everstep.agent.checks.check import History, Limits
from everstep.agent.checks.gpu.per_gpu import PerGpu
from everstep.agent.checks.gpu.samples import Code, Gpu, NvmlSample
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result

FAULTS = {
    Code.RESET_REQUIRED: ("the GPU must be reset", "Reset the GPU, then test the machine."),
    Code.INSUFFICIENT_POWER: ("it lacks external power", "Check its power cables."),
    Code.IRQ_ISSUE: ("its interrupts do not arrive", "Reboot, then ask the vendor."),
    Code.CORRUPTED_INFOROM: ("its InfoROM is corrupt", "Ask the vendor."),
}
"""As nvidia-smi exits with them; the gravest first. A corrupt InfoROM does not keep a GPU from
computing (NVIDIA/DCGM, issue 2: its diagnostics pass), so it decides who is tested first."""


class NeedsReset(PerGpu[Limits]):
    """Return codes of one GPU."""

    name = "gpu.needs_reset"
    about = "no GPU asks for a reset, power, or repair (NVML codes 16, 14, 8, 11)"

    def judge_gpu(self, gpu: History[Gpu], sample: NvmlSample) -> Result | None:
        del sample
        now = gpu.now.sample
        for code, (why, do) in FAULTS.items():
            if now.failed_with(code):
                return self.found(
                    Verdict.SUSPECT if code is Code.CORRUPTED_INFOROM else Verdict.EVICT,
                    Category.GPU_UNAVAILABLE,
                    f"{why} (NVML code {code:d})",
                    do,
                    item=now.name,
                )
        return self.passed("it asks for nothing", item=now.name) if now.values else None
