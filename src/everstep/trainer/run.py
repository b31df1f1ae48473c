"""What a training script holds: the steps of its loop, its numbers, its checkpoint.

attach() makes it. Outside everstep it is the same object with nothing behind it: it counts
steps and measures speed, so a script behaves alike under torchrun and plain python.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.model import NO_STEP, RankPhase, Step
from everstep.trainer import groups, recording
from everstep.trainer.checkpoint import Checkpoint
from everstep.trainer.communicating import Communicating
from everstep.trainer.feature import Feature
from everstep.trainer.heartbeat import Phase
from everstep.trainer.layout import Layout, layout_of
from everstep.trainer.metrics import Metrics
from everstep.trainer.notices import NoticeKind, Notices
from everstep.trainer.phases import Phases
from everstep.trainer.place import Place
from everstep.trainer.pulse import Pulse

if TYPE_CHECKING:
    from everstep.checkpoint.capture import Stateful

FLUSH_S = 60.0
"""Patience with the last save at the end of training: disks are not involved, so it is plenty."""


class Run:
    """One rank of one training run. Nothing here raises into training or waits, except
    Checkpoint.restore().
    """

    def __init__(self, place: Place | None, notices: Notices, peak_flops: float | None) -> None:
        self._place = place
        self._replicas = layout_of(None if place is None else place.context)
        self._notices = notices
        self._reports = Feature("everstep's reports of steps are", NoticeKind.REPORTS_OFF, notices)
        self._metrics = Metrics(peak_flops)
        self._pulse: Pulse | None = None
        self._checkpoint: Checkpoint | None = None
        self._looping = False
        self.mesh: Any = None
        """The device mesh that the script gave to attach()."""
        pace = Feature("everstep's look at phases and work is", NoticeKind.ADVICE, notices)
        self._phases = Phases(pace, None if place is None else place.context)
        self._communicating = Communicating(
            self._mark,
            partial(self._phases.communicate, begins=True),
            partial(self._phases.communicate, begins=False),
        )
        self._layout = Feature("everstep's look at process groups is", NoticeKind.ADVICE, notices)
        self._records = Feature("everstep's flight records are", NoticeKind.RECORDS_OFF, notices)
        if place is None:
            self._layout.on = self._records.on = False
        if place is not None:
            self._pulse = self._reports.attempt(partial(Pulse, place.context), None)

    @property
    def attached(self) -> bool:
        """Whether everstep started this process."""
        return self._place is not None

    @property
    def layout(self) -> Layout:
        """How many data-parallel replicas there are now, and how many there should be."""
        return self._replicas

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization of this rank's newest step, 0 to 1.

        report(flops=) of the step, over its duration and attach(peak_flops=); NaN while one of them
        is unknown.
        """
        return self._metrics.mfu

    @property
    def tokens_per_s(self) -> float:
        """report(tokens=) of the newest step over its duration; NaN while unknown."""
        return self._metrics.tokens_per_s

    def steps(self, *, start: int = 0, stop: int | None = None) -> Iterator[int]:
        """The steps to run, from `start` up to but without `stop` (None: for ever).

        A step counts as finished when the loop asks for the next one, which is after its optimizer
        update. When `stop` is reached the last save is complete.
        """
        numbers = itertools.count(start) if stop is None else range(start, stop)
        self._looping = True
        if self._checkpoint is not None:
            self._checkpoint.set_rng_again()
        self._reports.attempt(self._begin, None)
        try:
            for step in numbers:
                yield step
                self._reports.attempt(partial(self._finish_step, Step(step)), None)
        finally:
            self._looping = False
        self.flush(FLUSH_S)
        self._reports.attempt(self._end, None)

    def report(
        self,
        *,
        loss: Any = None,
        grad_norm: Any = None,
        tokens: float | None = None,
        flops: float | None = None,
    ) -> None:
        """Numbers of the current step, of this rank: numbers or tensors; CUDA is not waited for.

        `tokens` and `flops` are what this rank processes per step; they last until changed.
        """
        self._reports.attempt(
            partial(
                self._metrics.report, loss=loss, grad_norm=grad_norm, tokens=tokens, flops=flops
            ),
            None,
        )

    def communicating(self) -> AbstractContextManager[None]:
        """`with run.communicating():` around what exchanges data with other ranks.

        Backups to other machines then yield the network to it, within bounds, and time in it does
        not count as this rank's own work. A few stores to memory, and in the loop's thread two
        reads of /proc; may be nested, and used by several threads.
        """
        return self._communicating

    def evaluating(self) -> AbstractContextManager[None]:
        """`with run.evaluating():` around an evaluation: no step is missed meanwhile.

        How long one takes is learned, so that one that hangs is noticed too. A few stores to
        memory; may be nested, and used by several threads.
        """
        return self._phases.block(RankPhase.EVALUATING)

    def saving(self) -> AbstractContextManager[None]:
        """The same around a checkpoint of the script's own. Checkpoint.save() does not need it."""
        return self._phases.block(RankPhase.SAVING)

    def compiling(self) -> AbstractContextManager[None]:
        """The same around what compiles, if it does so after the first step."""
        return self._phases.block(RankPhase.COMPILING)

    def checkpoint(
        self,
        state: Mapping[str, Stateful],
        *,
        explicit_wait: bool = False,
        from_dcp: str | PathLike[str] | None = None,
    ) -> Checkpoint:
        """Checkpoints of everything in `state`: objects with state_dict() and load_state_dict().

        Random number states go with it. Give the optimizer too: parameters are then copied in the
        background, and its next step waits for that. An optimizer without torch.optim's hooks needs
        `explicit_wait`, the promise to call wait() on the result before each of its steps.

        `from_dcp` is a directory of torch.distributed.checkpoint, or its URL, that restore() loads
        when the job has no step of its own yet; it may come from another number of ranks or layout.
        """
        checkpoint = Checkpoint(
            self._place,
            state,
            self._notices,
            explicit_wait=explicit_wait,
            from_dcp=None if from_dcp is None else fspath(from_dcp),
        )
        checkpoint.on_restore = self._enter_restoring
        checkpoint.restoring = self._phases.block(RankPhase.RESTORING)
        checkpoint.on_save = self._saved
        if self._checkpoint is not None:
            checkpoint.refuse_second()
        else:
            self._checkpoint = checkpoint
        return checkpoint

    def flush(self, timeout_s: float) -> None:
        """Wait until the last save is complete, for at most this long."""
        if self._checkpoint is not None:
            self._checkpoint.flush(timeout_s)

    def stop(self) -> None:
        """End the copy thread. A rank need not: for processes that make many runs."""
        if self._checkpoint is not None:
            self._checkpoint.stop()

    def forget(self) -> None:
        """In a forked child: it is no rank. It must not write the slot or wait for a thread."""
        self._reports.on = self._records.on = False
        self._phases.forget()
        if self._checkpoint is not None:
            self._checkpoint.forget()

    # --- behind the fence ------------------------------------------------------------------------

    def _begin(self) -> None:
        self._records.attempt(self._serve_records, None)
        if self._pulse is not None:
            self._pulse.enter(Phase.TRAINING)
        now_ns = time.monotonic_ns()
        self._metrics.start(now_ns)
        self._phases.begin_steps(now_ns)

    def _finish_step(self, step: Step) -> None:
        if self._layout.on:
            self._layout.attempt(self._tell_groups, None)
            self._layout.on = False
            self._records.attempt(self._serve_records, None)
        now_ns = time.monotonic_ns()
        self._metrics.finish_step(now_ns)
        if self._pulse is not None:
            saved = NO_STEP if self._checkpoint is None else self._checkpoint.saved_step
            self._pulse.finish_step(step, now_ns, self._metrics, saved)
        self._phases.finish_step(step, now_ns)

    def _mark(self, since_ns: int) -> None:
        if self._pulse is not None:
            self._reports.attempt(partial(self._pulse.communicate, since_ns), None)

    def _tell_groups(self) -> None:
        """Once, before the first step is in the slot: the agent looks for it then."""
        if self._place is not None:
            context = self._place.context
            seen = groups.seen_here(self.mesh, context.world_size)
            told = groups.RankGroups(generation=context.generation, seen=seen)
            groups.tell(Path(context.shm), context.local_rank, told)

    def _serve_records(self) -> None:
        """As soon as there are groups, and again after the first step, which may make more."""
        if self._place is not None:
            recording.serve(self._place.context)

    def _saved(self, step: Step) -> None:
        """A loop of the script's own: its saves are the only sign of a finished step."""
        if not self._looping:
            self._reports.attempt(partial(self._finish_step, step), None)

    def _enter_restoring(self) -> None:
        if self._pulse is not None:
            self._reports.attempt(partial(self._pulse.enter, Phase.RESTORING), None)

    def _end(self) -> None:
        if self._pulse is not None:
            self._pulse.enter(Phase.ENDED)
        self._phases.end()
