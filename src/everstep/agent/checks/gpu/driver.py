"""Whether NVIDIA's driver answers at all. A machine whose driver does not cannot train.

That it hangs is found without a sample: by NvmlSource.unanswered, under the same name.
"""

from __future__ import annotations

from collections.abc import Iterable

from everstep.agent.checks.check import Check, Here, History, Limits
from everstep.agent.checks.gpu.per_gpu import baseline
from everstep.agent.checks.gpu.samples import Code, NvmlSample
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


LATER = frozenset({Code.LIB_RM_VERSION_MISMATCH, Code.CORRUPTED_INFOROM})
"""What runs goes on: a package was updated below it, or a GPU has forgotten something that it does
not need for computing. The next start may fail, and then this weighs."""


class Driver(Check[NvmlSample, Limits]):
    """Return codes of NVML as a whole. Evicts where GPUs were at work and cannot be any more."""

    name = "gpu.driver"
    source = "nvml"
    about = "NVIDIA's driver answers, and is not at odds with its library (NVML)"

    def judge(self, here: Here, history: History[NvmlSample]) -> Iterable[Result]:
        del here
        now = history.now.sample
        if not now.error:
            yield self.passed(f"driver {now.driver} answers", gpus=len(now.gpus))
        else:
            yield self._failed(now, had_gpus=baseline(history) is not None)

    def _failed(self, now: NvmlSample, *, had_gpus: bool) -> Result:
        """What a code means. A library without GPUs to drive, as some images have, is no fault."""
        code = next((code for code in FAULTS if code == now.error), None)
        if code is None or not (had_gpus or now.on_bus):
            return self.could_not_run(f"NVML returned {now.error}", do="Run nvidia-smi here.")
        if code is Code.DRIVER_NOT_LOADED and now.driver:
            why = f"NVML sees no driver, and the kernel has {now.driver}: this container may not"
            return self.could_not_run(why, do="Give the container its GPUs (/dev/nvidia*) again.")
        why, do = FAULTS[code]
        return self.found(
            Verdict.EVICT if had_gpus and code not in LATER else Verdict.SUSPECT,
            Category.GPU_UNAVAILABLE,
            f"{why} (NVML code {now.error})",
            do,
            cause=now.cause
            if code in {Code.DRIVER_NOT_LOADED, Code.LIB_RM_VERSION_MISMATCH}
            else "",
        )
