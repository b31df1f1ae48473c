"""One report of training's numbers: what every reader makes and every judge takes.

Kept apart from the readers because core/ judges such samples too, and may import no clock.
"""

from __future__ import annotations

from everstep.model import Rank, Seconds, Value


class Sample(Value, frozen=True, kw_only=True):
    """What one report of training says. None is "not said", which may be a fact itself."""

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    step_s: Seconds | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    tflops: float | None = None
    """Per second, mostly per GPU."""
    mfu: float | None = None
    """0 to 1."""
    loss_scale: float | None = None
    skipped: int = 0
    """Updates that the loss scaler left out since the report before."""
    at_minimum: bool = False
    """The loss scaler says that it cannot go lower."""
    lr: float | None = None
    batch: float | None = None
    """Samples in one step of the whole job."""
    gpu_gb: float | None = None
    host_gb: float | None = None
    epoch: float | None = None
    attempt: int | None = None
    rank: Rank | None = None
    host: str | None = None
    at: Seconds | None = None
    """Seconds since the epoch."""
    form: str = "pairs"
    """Which format it was: a field is only missed where the same format had it before."""
    line: int = 0

    @property
    def speed(self) -> float | None:
        """What is done per second, in whatever unit this trainer says it; None if it does not."""
        for value in (self.mfu, self.tflops, self.tokens_per_s, self.samples_per_s):
            if value is not None and value > 0:
                return value
        if self.step_s is None or self.step_s <= 0:
            return None
        return (self.batch or 1.0) / self.step_s


def sample_of(values: dict[str, float], *, form: str, line: int) -> Sample:
    """A sample of these fields; `values` must have a step."""
    rank, attempt = values.get("rank", -1.0), values.get("attempt", -1.0)
    return Sample(
        step=int(values["step"]),
        loss=values.get("loss"),
        grad_norm=values.get("grad_norm"),
        step_s=values.get("step_s"),
        tokens_per_s=values.get("tokens_per_s"),
        samples_per_s=values.get("samples_per_s"),
        tflops=values.get("tflops"),
        mfu=values.get("mfu"),
        loss_scale=values.get("loss_scale"),
        lr=values.get("lr"),
        batch=values.get("batch"),
        gpu_gb=values.get("gpu_gb"),
        host_gb=values.get("host_gb"),
        epoch=values.get("epoch"),
        rank=Rank(int(rank)) if rank >= 0 else None,
        attempt=int(attempt) if attempt >= 0 else None,
        form=form,
        line=line,
    )
