"""What a script sees of its checkpoint: restore(), save(), wait(). Torch is loaded behind it.

Run.checkpoint() makes it; memory.py does the work. save() and wait() never raise: what goes wrong
there is told once and costs the checkpoints, not the training. restore() is the one place that
raises, because a rank that was told to go on from step 100 must not begin at step 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from everstep.model import NO_STEP, EverstepError, Step
from everstep.trainer.feature import Feature
from everstep.trainer.notices import NoticeKind, Notices
from everstep.trainer.place import Place

if TYPE_CHECKING:
    from everstep.checkpoint.capture import Stateful
    from everstep.trainer.memory import Memory


class CheckpointUnusable(EverstepError):
    """The step that this rank was told to restore cannot be restored from any copy.

    Bad copies were dropped before, so the restart that follows is given an older step.
    """


class CheckpointDoesNotFit(CheckpointUnusable):
    """The copy is good, and the script's state is another one: the script was changed."""


class Checkpoint:
    """Checkpoints of one rank's state after every step that save() is called for."""

    def __init__(
        self,
        place: Place | None,
        state: Mapping[str, Stateful],
        notices: Notices,
        *,
        explicit_wait: bool,
        from_dcp: str | None = None,
    ) -> None:
        self._place = place
        self._from_dcp = from_dcp
        self._state = dict(state)
        self._notices = notices
        self._feature = Feature("checkpoints in memory are", NoticeKind.CHECKPOINT_OFF, notices)
        self._set_rng: Callable[[], None] | None = None
        self._memory: Memory | None = None
        self.on_restore: Callable[[], None] = _nothing
        self.restoring: AbstractContextManager[None] = nullcontext()
        self.on_save: Callable[[Step], None] = _ignore
        if place is not None:
            opening = partial(self._open, place, explicit_wait=explicit_wait)
            self._memory = self._feature.attempt(opening, None)

    @property
    def saved_step(self) -> Step:
        """Newest step of which this rank's copy in memory is complete; -1 for none."""
        return NO_STEP if self._memory is None else self._memory.saved_step

    def restore(self) -> int:
        """Load what everstep says is to be restored; the step to run next, 0 for a fresh start.

        With `from_dcp`, a fresh start loads that directory, and goes on after its step. Raises
        CheckpointUnusable if no copy of that step is good, or none fits this state.
        """
        if self._place is None or self._place.context.restore == NO_STEP:
            return 0 if self._from_dcp is None else self._start_from(self._from_dcp)
        from everstep.trainer.restore import restore_state  # noqa: PLC0415 -- needs torch

        self.on_restore()
        with self.restoring:
            restored = restore_state(self._place.context, self._state, self._notices)
        self._set_rng = restored.set_rng
        if self._memory is not None:
            self._feature.attempt(partial(self._memory.restored, restored.in_memory), None)
        return self._place.context.restore + 1

    def _start_from(self, directory: str) -> int:
        """Also outside everstep: a script starts from the same place under torchrun."""
        from everstep.trainer.restore import start_state  # noqa: PLC0415 -- needs torch

        self.on_restore()
        with self.restoring:
            started = start_state(directory, self._state, self._notices)
        self._set_rng = started.set_rng
        return started.step + 1

    def save(self, step: int) -> None:
        """Keep the state after this step. Call it after the optimizer's step, before the next data.

        Returns when everything is copied that anything but the optimizer may change; the rest is
        copied while training goes on, and the optimizer's next step waits for it.
        """
        if self._memory is not None:
            self._feature.attempt(partial(self._memory.save, Step(step)), None)
        self.on_save(Step(step))

    def wait(self) -> None:
        """Wait until the last save has read the state. Only scripts whose optimizer has no
        torch.optim hook need it, before each step; and whoever changes parameters otherwise.
        """
        if self._memory is not None:
            self._feature.attempt(self._memory.hold, None)

    # --- for Run ---------------------------------------------------------------------------------

    def flush(self, timeout_s: float) -> None:
        """Wait until the last save is complete."""
        if self._memory is not None:
            self._feature.attempt(partial(self._memory.flush, timeout_s), None)

    def set_rng_again(self) -> None:
        """Just before the first step: what the script drew since restore() does not count."""
        if self._set_rng is not None:
            self._set_rng()
            self._set_rng = None

    def refuse_second(self) -> None:
        self._feature.switch_off(
            EverstepError("a run has one checkpoint: give all state to one call of checkpoint()")
        )
        self._memory = None

    def stop(self) -> None:
        if self._memory is not None:
            self._memory.stop()

    def forget(self) -> None:
        if self._memory is not None:
            self._memory.forget()
        self._memory = None

    def _open(self, place: Place, *, explicit_wait: bool) -> Memory:
        from everstep.trainer.memory import Memory  # noqa: PLC0415 -- needs torch

        memory = Memory(place, self._state, self._notices, explicit_wait=explicit_wait)
        memory.start(self.wait, self._feature)
        return memory


def _nothing() -> None:
    pass


def _ignore(_step: Step) -> None:
    pass
