"""How busy a GPU's cores were between two samples, by NVML's GPM: Hopper and later.

NVML's own "utilization" is 100 % for a kernel that only waits for a peer; the share of time with
tensor cores at work is near 0 then. Used by the source in nvml.py.
"""

from __future__ import annotations

from typing import Any

from everstep.agent.checks.gpu.reading import Reading
from everstep.agent.checks.gpu.samples import Signal

METRICS = {2: Signal.SM_PERCENT, 5: Signal.TENSOR_PERCENT, 10: Signal.DRAM_PERCENT}
"""NVML_GPM_METRIC_SM_UTIL, ANY_TENSOR_UTIL, DRAM_BW_UTIL (nvml.h)."""


class Activity:
    """Keeps each GPU's last counters; they are memory of NVML, and freed when replaced."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._last: dict[int, Any] = {}
        self._without: set[int] = set()
        """GPUs that have no such counters."""

    def read(self, reading: Reading, handle: Any) -> None:
        """Put the shares of the time since the last call into `reading`."""
        if reading.index in self._without or not self._supported(reading, handle):
            return
        fresh = self._take(reading, handle)
        last = self._last.pop(reading.index, None)
        if fresh is not None:
            self._last[reading.index] = fresh
            if last is not None:
                self._compare(reading, last, fresh)
        if last is not None:
            reading.ask(Signal.TENSOR_PERCENT, lambda: self._nvml.nvmlGpmSampleFree(last))

    def _supported(self, reading: Reading, handle: Any) -> bool:
        if reading.index in self._last:
            return True
        answer = reading.ask(
            Signal.TENSOR_PERCENT, lambda: self._nvml.nvmlGpmQueryDeviceSupport(handle)
        )
        if answer is None or not answer.isSupportedDevice:
            self._without.add(reading.index)
            return False
        return True

    def _take(self, reading: Reading, handle: Any) -> Any:
        fresh = reading.ask(Signal.TENSOR_PERCENT, self._nvml.nvmlGpmSampleAlloc)
        if fresh is None:
            return None
        taken = reading.ask(
            Signal.TENSOR_PERCENT, lambda: self._nvml.nvmlGpmSampleGet(handle, fresh)
        )
        if taken is None:
            reading.ask(Signal.TENSOR_PERCENT, lambda: self._nvml.nvmlGpmSampleFree(fresh))
        return taken

    def _compare(self, reading: Reading, last: Any, fresh: Any) -> None:
        asked = self._nvml.c_nvmlGpmMetricsGet_t()
        asked.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        asked.numMetrics = len(METRICS)
        asked.sample1, asked.sample2 = last, fresh
        for at, metric in enumerate(METRICS):
            asked.metrics[at].metricId = metric
        reading.ask(Signal.TENSOR_PERCENT, lambda: self._nvml.nvmlGpmMetricsGet(asked))
        if Signal.TENSOR_PERCENT in reading.errors:
            return
        for at, signal in enumerate(METRICS.values()):
            answer = asked.metrics[at]
            if answer.nvmlReturn:
                reading.errors[signal] = answer.nvmlReturn
            else:
                reading.keep(signal, answer.value)
