"""What a rank says of what it does: its phase, and how long it computes in a step.

run.py has one for the whole process. Everything that fails here is the fence's matter (feature.py),
and outside everstep nothing is written.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from types import TracebackType

from everstep.model import RankPhase, Step
from everstep.trainer.compute import Compute
from everstep.trainer.context import AttachContext
from everstep.trainer.feature import Feature
from everstep.trainer.pace import FILE, Pace, PaceWriter


class Phases:
    """The entry of this rank in the file "paces"."""

    def __init__(self, feature: Feature, context: AttachContext | None) -> None:
        """No context: nothing is said."""
        self._feature = feature
        self._lock = threading.RLock()  # a signal's handler may save while this is written
        self._compute = Compute()
        self._open: list[tuple[RankPhase, int]] = []
        """Blocks that are entered and not left, of all threads, oldest first, with their times."""
        self._base = (RankPhase.STARTING, time.monotonic_ns())
        self._pace = Pace(generation=0)
        self._writer: PaceWriter | None = None
        self._blocks = {phase: Block(self, phase) for phase in RankPhase}
        if context is not None:
            feature.attempt(partial(self._begin, context), None)

    def block(self, phase: RankPhase) -> Block:
        """A context manager for what lasts; may be nested, and used by several threads."""
        return self._blocks[phase]

    def begin_steps(self, now_ns: int) -> None:
        """The first step begins on this thread. It is a part of the start: it may compile."""
        self._feature.attempt(partial(self._begin_steps, now_ns), None)

    def finish_step(self, step: Step, now_ns: int) -> None:
        self._feature.attempt(partial(self._finish_step, step, now_ns), None)

    def end(self) -> None:
        """There are no more steps."""
        self._feature.attempt(partial(self._set_base, RankPhase.ENDED), None)

    def enter(self, phase: RankPhase) -> None:
        """A block begins."""
        entered = (phase, time.monotonic_ns())
        with self._lock:
            self._open.append(entered)
            self._feature.attempt(self._tell, None)
        self._feature.attempt(partial(self._compute.leave, communicates=False), None)

    def leave(self, phase: RankPhase) -> None:
        """The newest block of this phase ends. Whose it is does not matter: they are alike."""
        with self._lock:
            mine = [entry for entry in self._open if entry[0] is phase]
            if mine:
                self._open.remove(mine[-1])
            self._feature.attempt(self._tell, None)
        self._feature.attempt(self._compute.come_back, None)

    def communicate(self, *, begins: bool) -> None:
        """A block of communication begins or ends on this thread."""
        leave = partial(self._compute.leave, communicates=True)
        self._feature.attempt(leave if begins else self._compute.come_back, None)

    def forget(self) -> None:
        """In a forked child: the entry and perhaps the lock are of the parent."""
        self._feature.on = False
        self._lock = threading.RLock()

    def _begin(self, context: AttachContext) -> None:
        writer = PaceWriter(Path(context.shm) / FILE, context.local_rank)
        self._pace.generation = context.generation
        with self._lock:
            self._writer = writer
            self._tell()

    def _begin_steps(self, now_ns: int) -> None:
        if self._writer is None:
            return
        self._compute.finish_step(now_ns)
        if self._pace.step >= 0:  # the loop of another epoch
            self._set_base(RankPhase.TRAINING)

    def _set_base(self, phase: RankPhase) -> None:
        with self._lock:
            if self._base[0] is not phase:
                self._base = (phase, time.monotonic_ns())
                self._tell()

    def _finish_step(self, step: Step, now_ns: int) -> None:
        if self._writer is None:
            return
        compute_s, wall_s = self._compute.finish_step(now_ns)
        with self._lock:
            if self._base[0] is not RankPhase.TRAINING:
                self._base = (RankPhase.TRAINING, now_ns)
            self._pace.step = step
            self._pace.compute_s, self._pace.wall_s = compute_s, wall_s
            self._tell()

    def _tell(self) -> None:
        """The oldest block that lasts: how long a whole evaluation takes is what is learned."""
        if self._writer is not None:
            self._pace.phase, self._pace.since_ns = self._open[0] if self._open else self._base
            self._writer.write(self._pace)


class Block:
    """A context manager that may be entered again and again."""

    def __init__(self, phases: Phases, phase: RankPhase) -> None:
        self._phases = phases
        self._phase = phase

    def __enter__(self) -> None:
        self._phases.enter(self._phase)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._phases.leave(self._phase)
