"""Rows of a GPU's memory that were replaced by spare ones: Ampere and later."""

from __future__ import annotations

from everstep.agent.checks.check import History, Limits
from everstep.agent.checks.gpu.per_gpu import PerGpu
from everstep.agent.checks.gpu.samples import Gpu, NvmlSample, Signal
from everstep.diagnosis.words import Category, Verdict
from everstep.health import Result

REPLACE = "Run the vendor's field diagnostic; expect to replace the GPU."


class RemapLimits(Limits, frozen=True, kw_only=True):
    """Thresholds of gpu.remap."""

    most: int = 512
    """Rows replaced for uncorrectable errors at which the GPU has no spares left (NVIDIA's memory
    error management guide)."""
    possible: int = 65_536
    """Rows that no GPU can have replaced."""


class Remap(PerGpu[RemapLimits]):
    """Remapping that failed, waits for a reset, or is used up."""

    name = "gpu.remap"
    about = "memory rows are not waiting to be replaced, nor out of spares (NVML fields 143-145)"
    limits_type = RemapLimits

    def judge_gpu(self, gpu: History[Gpu], sample: NvmlSample) -> Result | None:
        del sample
        now = gpu.now.sample
        rows = now.get(Signal.REMAPPED_UNCORRECTED)
        failed, pending = now.get(Signal.REMAP_FAILED), now.get(Signal.REMAP_PENDING)
        if rows is None and failed is None and pending is None:
            return None
        if (rows or 0) > self.limits.possible or not {failed, pending} <= {0, 1, None}:
            why = f"{rows} rows, failed {failed}, pending {pending}: no sound answer"
            return self.could_not_run(why, item=now.name)
        if failed:
            return self._found(now, Verdict.EVICT, "replacing a memory row has failed", REPLACE)
        if rows is not None and rows >= self.limits.most:
            why = f"{rows:.0f} memory rows are replaced, of at most {self.limits.most}"
            return self._found(now, Verdict.EVICT, why, REPLACE)
        if pending:
            why = "a memory row waits to be replaced, which needs a reset"
            return self._found(now, Verdict.SUSPECT, why, "Reset the GPU at the next stop.")
        return self.passed("nothing to replace", item=now.name, remapped_rows=rows or 0.0)

    def _found(self, now: Gpu, verdict: Verdict, why: str, do: str) -> Result:
        rows = now.get(Signal.REMAPPED_UNCORRECTED) or 0.0
        return self.found(
            verdict,
            Category.GPU_MEMORY_ERROR,
            why,
            do,
            item=now.name,
            values={"remapped_rows": rows},
        )
