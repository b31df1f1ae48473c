"""Numbers a script reports: loss and gradient norm as they come, throughput from step durations.

Used by run.py at every step, so everything here is arithmetic on plain numbers. A CUDA tensor is
never waited for: its value is fetched on the side and appears in the report one step later.
"""

from __future__ import annotations

from typing import Any

NAN = float("nan")
_NS = 1e-9


class Scalar:
    """A number that may still be on its way from the device."""

    def __init__(self) -> None:
        self.value = NAN
        self.known = False
        """Whether `value` was ever reported: until then NaN means that nobody knows."""
        self.late = False
        """It comes from the device, and is of the step before."""
        self._coming: tuple[Any, Any] | None = None

    def offer(self, number: Any) -> None:
        """Take a Python number, a CPU tensor, or a CUDA tensor that is read later."""
        if getattr(number, "is_cuda", False):
            self.poll()
            if self._coming is None:
                self._coming = _fetch(number)
        else:
            detach = getattr(number, "detach", None)  # of a tensor: float() of a graph warns
            self.value = float(number if detach is None else detach())
            self.known = True

    def poll(self) -> float:
        """The newest value that has arrived."""
        if self._coming is not None:
            event, host = self._coming
            if event.query():
                self.value = float(host)
                self.known = self.late = True
                self._coming = None
        return self.value


def _fetch(tensor: Any) -> tuple[Any, Any]:
    """Queue a copy to pinned memory behind the work that computes the tensor."""
    import torch  # noqa: PLC0415 -- only a CUDA tensor needs it

    host = torch.empty((), dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor.detach().reshape(()), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return event, host


class Metrics:
    """What one rank knows about its own speed."""

    def __init__(self, peak_flops: float | None) -> None:
        self._peak_flops = peak_flops
        self._last_ns = 0
        self._tokens = NAN
        self._flops = NAN
        self.loss = Scalar()
        self.grad_norm = Scalar()
        self.step_s = NAN
        self.tokens_per_s = NAN
        self.flops_per_s = NAN

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization of the newest step, 0 to 1; NaN while a figure is missing."""
        return NAN if self._peak_flops is None else self.flops_per_s / self._peak_flops

    def report(
        self, *, loss: Any, grad_norm: Any, tokens: float | None, flops: float | None
    ) -> None:
        if loss is not None:
            self.loss.offer(loss)
        if grad_norm is not None:
            self.grad_norm.offer(grad_norm)
        if tokens is not None:
            self._tokens = float(tokens)
        if flops is not None:
            self._flops = float(flops)

    def start(self, now_ns: int) -> None:
        """The first step begins."""
        self._last_ns = now_ns

    def finish_step(self, now_ns: int) -> None:
        duration_s = (now_ns - self._last_ns) * _NS
        if self._last_ns and duration_s > 0:
            self.step_s = duration_s
            self.tokens_per_s = self._tokens / duration_s
            self.flops_per_s = self._flops / duration_s
        self._last_ns = now_ns
