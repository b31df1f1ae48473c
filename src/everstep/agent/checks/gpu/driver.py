"""Whether NVIDIA's driver answers at all. A machine whose driver does not cannot train.

That it hangs is found without a sample: by NvmlSource.unanswered, under the same name.
"""

from __future__ import annotations

from collections.abc import Iterable

from everstep.agent.checks.check import Check, Here, History
from everstep.agent.checks.gpu.per_gpu import baseline
from everstep.agent.checks.gpu.samples import Code, NvmlSample
from everstep.agent.checks.gpu.starting import StartLimits, judge_start
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result

FAULTS = {
    Code.DRIVER_NOT_LOADED: ("the driver is not loaded", "Load the driver, or reboot."),
    Code.LIB_RM_VERSION_MISMATCH: (
        "the driver's library and its kernel module are of different versions",
        "Finish the driver's update: reload its modules, or reboot.",
    ),
    Code.GPU_IS_LOST: ("NVML answers only that a GPU is lost", "Reboot the machine."),
    Code.RESET_REQUIRED: ("NVML answers only that a GPU needs a reset", "Reset the GPU."),
    Code.CORRUPTED_INFOROM: ("NVML answers only that an InfoROM is corrupt", "Ask the vendor."),
    Code.INSUFFICIENT_POWER: ("a GPU lacks external power", "Check the power cables."),
    Code.IRQ_ISSUE: ("a GPU's interrupts do not arrive", "Reboot, then ask the vendor."),
}


class Driver(Check[NvmlSample, StartLimits]):
    """Return codes of NVML as a whole."""

    name = "gpu.driver"
    source = "nvml"
    about = "NVIDIA's driver answers, and is not at odds with its library (NVML)"
    limits_type = StartLimits

    def judge(self, here: Here, history: History[NvmlSample]) -> Iterable[Result]:
        now = history.now.sample
        if now.starting_s:
            hangs = judge_start(self.name, self.limits, here, now.starting_s, now.driver)
            why = f"the GPUs have been starting for {now.starting_s:.0f} s"
            yield hangs or self.could_not_run(why)
        elif not now.error:
            yield self.passed(f"driver {now.driver} answers", gpus=len(now.gpus))
        else:
            yield self._failed(now, needed=now.expected or baseline(history) is not None)

    def _failed(self, now: NvmlSample, *, needed: bool) -> Result:
        """What a code means. A library without GPUs to drive, as some images have, is no fault."""
        code = next((code for code in FAULTS if code == now.error), None)
        if code is None or not needed:
            return self.could_not_run(f"NVML returned {now.error}", do="Run nvidia-smi here.")
        why, do = FAULTS[code]
        return self.found(
            Verdict.EVICT,
            Category.GPU_UNAVAILABLE,
            f"{why} (NVML code {now.error})",
            do,
            cause=now.cause
            if code in {Code.DRIVER_NOT_LOADED, Code.LIB_RM_VERSION_MISMATCH}
            else "",
        )
