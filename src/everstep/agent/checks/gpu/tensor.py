"""How busy tensor cores are. Recorded only: that all ranks are idle says something of the job."""

from __future__ import annotations

from everstep.agent.checks.check import History, Limits
from everstep.agent.checks.gpu.per_gpu import PerGpu
from everstep.agent.checks.gpu.samples import Gpu, NvmlSample, Signal
from everstep.health import Result

RECORDED = (Signal.TENSOR_PERCENT, Signal.SM_PERCENT, Signal.DRAM_PERCENT, Signal.UTIL_PERCENT)


class Tensor(PerGpu[Limits]):
    """Shares of time since the sample before; Hopper and later have those of tensor cores."""

    name = "gpu.tensor"
    about = "records how busy tensor cores, SMs and memory are (NVML's GPM); judges nothing"

    def judge_gpu(self, gpu: History[Gpu], sample: NvmlSample) -> Result | None:
        del sample
        now = gpu.now.sample
        values = {
            str(signal): value for signal in RECORDED if (value := now.get(signal)) is not None
        }
        tensor = now.get(Signal.TENSOR_PERCENT)
        if tensor is None:
            return None
        return self.passed(f"tensor cores {tensor:.0f} % busy", item=now.name, **values)
