"""What the driver itself says must be done about a GPU. The best single signal where it exists."""

from __future__ import annotations

from everstep.agent.checks.check import History, Limits
from everstep.agent.checks.gpu.per_gpu import PerGpu
from everstep.agent.checks.gpu.samples import Gpu, NvmlSample, Signal
from everstep.agent.checks.xids import ACTIONS
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result


class Recovery(PerGpu[Limits]):
    """NVML's field 230; drivers from R570 have it."""

    name = "gpu.recovery"
    about = "the driver asks for no reset, reboot or drain (NVML field 230)"

    def judge_gpu(self, gpu: History[Gpu], sample: NvmlSample) -> Result | None:
        del sample
        now = gpu.now.sample
        told = now.get(Signal.RECOVERY_ACTION)
        if told is None:
            return None
        if not told:
            return self.passed("the driver asks for nothing", item=now.name)
        name, verdict, do = ACTIONS.get(
            int(told), (f"action {told:.0f}, unknown here", Verdict.WARN, "Run nvidia-smi -q here.")
        )
        return self.found(
            verdict,
            Category.GPU_UNAVAILABLE,
            f"the driver asks for: {name}",
            do,
            item=now.name,
            values={"recovery_action": told},
        )
