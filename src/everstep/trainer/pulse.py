"""The heartbeat slot of this rank as run.py writes it: a few stores into shared memory per step.

The identity in the slot is the one that agent/rank_main.py wrote right after the fork. It stays,
even where the script runs as a child of what the agent started (a shell wrapper): it names the
process that the agent watches.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

from everstep.model import NO_STEP, Step
from everstep.trainer.context import AttachContext
from everstep.trainer.heartbeat import SLOT_BYTES, Heartbeat, Phase, SlotWriter, unpack
from everstep.trainer.metrics import Metrics
from everstep.trainer.recall import Recall, deterministic


class Pulse:
    """Writer of one rank's slot."""

    def __init__(self, context: AttachContext) -> None:
        self._context = context
        self._recall: Recall | None = None
        self._may_recall = True
        path = Path(context.shm) / "heartbeat"
        self._slot = SlotWriter(path, context.local_rank)
        self._beat = _identity(path, context)
        self._beat.attached = True
        self._slot.write(self._beat)

    def enter(self, phase: Phase) -> None:
        self._beat.phase = phase
        self._slot.write(self._beat)

    def communicate(self, since_ns: int) -> None:
        """0: no longer."""
        self._slot.communicate(since_ns)

    def finish_step(self, step: Step, now_ns: int, metrics: Metrics, saved: Step) -> None:
        beat = self._beat
        beat.step = step
        beat.at_ns = now_ns
        beat.loss = metrics.loss.poll()
        if beat.bad_step == NO_STEP and metrics.loss.known and not math.isfinite(beat.loss):
            beat.bad_step = max(0, step - metrics.loss.late)
        beat.grad_norm = metrics.grad_norm.poll()
        self._compare(step - metrics.loss.late, beat.loss)
        beat.step_s = metrics.step_s
        beat.tokens_per_s = metrics.tokens_per_s
        beat.flops_per_s = metrics.flops_per_s
        beat.saved_step = saved
        self._slot.write(beat)

    def _compare(self, step: int, loss: float) -> None:
        """Keep it; compare it with what the same step came to before, if its bits should be so."""
        if step < 0 or not math.isfinite(loss):
            return
        if self._recall is None and self._may_recall:
            self._may_recall = False
            context = self._context
            with contextlib.suppress(OSError):  # no memory left: then nothing is compared
                self._recall = Recall(
                    Path(context.shm), context.rank, context.world_size, context.generation
                )
        if self._recall is None:
            return
        differs = self._recall.differs(step, loss, exact=deterministic())
        if differs and self._beat.differs_step == NO_STEP:
            self._beat.differs_step = step


def _identity(path: Path, context: AttachContext) -> Heartbeat:
    """What the slot says about this very rank and generation, or else this process."""
    with path.open("rb") as file:
        file.seek(context.local_rank * SLOT_BYTES)
        found = unpack(file.read(SLOT_BYTES))
    if found is not None and (found.generation, found.rank) == (context.generation, context.rank):
        return found
    return Heartbeat(
        generation=context.generation,
        rank=context.rank,
        pid=os.getpid(),
        start_ticks=_start_ticks(),
    )


def _start_ticks() -> int:
    """Field 22 of /proc/self/stat. The command's name before it may hold spaces and brackets."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19])
